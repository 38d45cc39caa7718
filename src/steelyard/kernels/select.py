"""Which attention backend serves a model on a device: a table, and the reason in words. Imports no backend itself.

auto   CUDA (compute capability 8 or newer), head and block size in the table -> triton; other CUDA -> sdpa; CPU -> cpu
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from steelyard.errors import StartError
from steelyard.kernels.gpu import Gpu, gpu_of


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a backend's class is, the devices it runs on, and whether its steps may be captured in CUDA graphs.

    `arguments` go to its constructor where it is not built by a device's own start.
    """

    where: str
    devices: tuple[str, ...]
    captured: bool = False
    arguments: tuple[str, ...] = ()


_GATHERED = "steelyard.kernels.gathered:GatheredAttention"
ATTENTION = {
    "triton": Entry("steelyard.kernels.triton_attention:TritonAttention", ("cuda",), captured=True),
    "cpu": Entry("steelyard.kernels.cpu_attention:CpuAttention", ("cpu",)),
    "sdpa": Entry(_GATHERED, ("cpu", "cuda"), arguments=("sdpa",)),
    "naive": Entry(_GATHERED, ("cpu", "cuda"), arguments=("naive",)),
    "reference": Entry("steelyard.kernels.reference:ReferenceAttention", ("cpu",)),
}
"""Name -> what it is. Only the chosen one is imported: Triton need not be installed for the others."""

OPTIONAL = {"flashinfer": "flashinfer"}
"""Names that are probed: the package each needs. They are timed by `steelyard bench kernels`; none serves yet."""

TRITON_HEAD_DIMS = (64, 80, 96, 128, 256)
TRITON_BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend's name and why it was taken, fit for a start-up line."""

    name: str
    reason: str


def choose_attention(
    requested: str, head_dim: int, block_size: int, device: torch.device, gpu: Gpu | None = None
) -> Choice:
    """The backend for `requested` (a name of ATTENTION, or auto); `gpu`: the device's, where it is elsewhere.

    Raises StartError on an unknown or unusable name.
    """
    if requested in ("auto", "triton"):
        gpu = gpu or gpu_of(device)
    if requested == "auto":
        obstacle = _triton_obstacle(head_dim, block_size, device, gpu)
        if obstacle or gpu is None:
            return Choice("cpu" if device.type == "cpu" else "sdpa", obstacle)
        return Choice("triton", f"head size {head_dim}, blocks of {block_size} on {gpu.name}")
    obstacle = _obstacle(requested, head_dim, block_size, device, gpu)
    if obstacle:
        raise StartError(f"attention backend {requested!r}: {obstacle}", param="attention_backend")
    return Choice(requested, "asked for")


def attention_class(name: str) -> Any:
    """The class of a backend of ATTENTION, imported now."""
    module, attribute = ATTENTION[name].where.split(":")
    return getattr(importlib.import_module(module), attribute)


def make_attention(name: str, *more: Any) -> Any:
    """A backend that is not bound to a device's own start."""
    create: Callable[..., Any] = attention_class(name)
    return create(*ATTENTION[name].arguments, *more)


def _obstacle(requested: str, head_dim: int, block_size: int, device: torch.device, gpu: Gpu | None) -> str:
    """Why `requested` cannot serve this, or an empty string."""
    if requested in OPTIONAL:
        package = OPTIONAL[requested]
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed here; use auto"
        return f"{package} is measured by `steelyard bench kernels` and serves nothing yet; use auto"
    if requested not in ATTENTION:
        return f"choose one of {', '.join(('auto', *ATTENTION))}"
    devices = ATTENTION[requested].devices
    if device.type not in devices:
        return f"it runs on {' and '.join(devices)}, this is {device.type}; use auto"
    why = _triton_obstacle(head_dim, block_size, device, gpu) if requested == "triton" else ""
    return why and f"{why}; use auto"


def _triton_obstacle(head_dim: int, block_size: int, device: torch.device, gpu: Gpu | None) -> str:
    """Why the Triton kernels cannot serve this, or an empty string."""
    if gpu is None:
        return f"Triton needs a CUDA device, this is {device.type}"
    if gpu.capability[0] < 8:
        return "Triton attention needs compute capability 8.0 or newer"
    if head_dim not in TRITON_HEAD_DIMS:
        return f"head size {head_dim} is not one of {', '.join(map(str, TRITON_HEAD_DIMS))}"
    if block_size not in TRITON_BLOCK_SIZES:
        return f"blocks of {block_size} are not one of {', '.join(map(str, TRITON_BLOCK_SIZES))}"
    return ""
