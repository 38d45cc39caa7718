"""Which attention backend serves a model on a device: a table, and the reason in words. Imports no backend itself.

auto   CUDA (compute capability 8 or newer), head and block size in the table -> triton; else torch
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from steelyard.errors import StartError

ATTENTION = {
    "triton": "steelyard.kernels.triton_attention:TritonAttention",
    "cpu": "steelyard.kernels.cpu_attention:CpuAttention",
    "reference": "steelyard.kernels.reference:ReferenceAttention",
}
"""Name -> where the class is. Only the chosen one is imported: Triton need not be installed for the others."""

TRITON_HEAD_DIMS = (64, 80, 96, 128, 256)
TRITON_BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend's name and why it was taken, fit for a start-up line."""

    name: str
    reason: str


def choose_attention(requested: str, head_dim: int, block_size: int, device: torch.device) -> Choice:
    """The backend for `requested` (a name of ATTENTION, or auto). Raises StartError on an unknown or unusable name."""
    if requested != "auto" and requested not in ATTENTION:
        raise StartError(f"attention backend {requested!r}: choose one of auto, {', '.join(ATTENTION)}")
    obstacle = _triton_obstacle(head_dim, block_size, device)
    if requested == "triton" and obstacle:
        raise StartError(f"attention backend 'triton': {obstacle}; use auto")
    if requested != "auto":
        return Choice(requested, "asked for")
    if obstacle:
        return Choice("cpu" if device.type == "cpu" else "reference", obstacle)
    return Choice("triton", f"head size {head_dim}, blocks of {block_size} on {torch.cuda.get_device_name(device)}")


def attention_class(name: str) -> Any:
    """The class of a backend of ATTENTION, imported now."""
    module, attribute = ATTENTION[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def _triton_obstacle(head_dim: int, block_size: int, device: torch.device) -> str:
    """Why the Triton kernels cannot serve this, or an empty string."""
    if device.type != "cuda":
        return f"Triton needs a CUDA device, this is {device.type}"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "Triton attention needs compute capability 8.0 or newer"
    if head_dim not in TRITON_HEAD_DIMS:
        return f"head size {head_dim} is not one of {', '.join(map(str, TRITON_HEAD_DIMS))}"
    if block_size not in TRITON_BLOCK_SIZES:
        return f"blocks of {block_size} are not one of {', '.join(map(str, TRITON_BLOCK_SIZES))}"
    return ""
