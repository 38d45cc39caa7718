"""Which kernels a call really ran, from torch's profiler, and which attention they amount to."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from steelyard.kernels.cpu_products import PROFILED_AS

STDERR = 2
PATHS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("FlashInfer", ("flashinfer", "batchprefill", "batchdecode"), True),
    ("steelyard, products of a block of queries", (PROFILED_AS,), True),
    ("steelyard Triton", ("decode_split", "train_forward_kernel", "prefill"), True),
    ("cuDNN", ("cudnn",), True),
    ("torch flash", ("flash_fwd", "flash_attention", "flash_attention_for_cpu"), True),
    ("torch memory-efficient", ("fmha_cutlass", "efficient_attention"), True),
    ("score matrix in memory", ("_attention_math", "softmax"), False),
)
"""Name, what its kernels are called (lower case), whether the whole score matrix stays out of memory; first match."""
VIEWS = frozenset(
    {"as_strided", "view", "transpose", "expand", "reshape", "empty", "empty_like", "empty_strided", "slice", "select",
     "unflatten", "flatten", "_unsafe_view", "_reshape_alias", "resolve_conj", "permute", "unsqueeze", "squeeze"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel (GPU) or an operator's own time (CPU) over a whole call."""

    name: str
    count: int
    total_us: float


@dataclass(frozen=True, slots=True)
class Path:
    """The attention that a call took. `is_fast`: the whole score matrix never stood in memory."""

    name: str
    is_fast: bool


@contextmanager
def standard_error(is_passed_on: Callable[[str], bool]) -> Iterator[list[str]]:
    """What is written to standard error meanwhile, known when it ends; only lines that are passed on reach it.

    C++ writes there itself, so the file descriptor is exchanged and not `sys.stderr`.
    """
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(STDERR)
    with tempfile.TemporaryFile() as seen:
        os.dup2(seen.fileno(), STDERR)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, STDERR)
            os.close(kept)
            seen.seek(0)
            lines += seen.read().decode(errors="replace").splitlines(keepends=True)
            os.write(STDERR, "".join(filter(is_passed_on, lines)).encode())


def is_no_marker(line: str) -> bool:
    """torch's profiler writes a marker whenever it starts and stops, and what its events are good for."""
    return not line.startswith("USDT:") and "Profiler clears events" not in line and line.strip() != "_warn_once("


def kernels_of(call: Callable[[], object], device: torch.device, warm_up: int = 1) -> list[KernelTime]:
    """What ran during one call, the longest first. The call is made `warm_up` times before."""
    for _ in range(warm_up):
        call()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    with standard_error(is_no_marker), profile(activities=activities) as seen:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    found = []
    for event in seen.key_averages():
        if device.type == "cuda":
            if event.device_type == DeviceType.CUDA and event.self_device_time_total > 0:
                found.append(KernelTime(event.key, event.count, float(event.self_device_time_total)))
        elif event.key.startswith(("aten::", "steelyard::")) and event.key.removeprefix("aten::") not in VIEWS:
            found.append(KernelTime(event.key, event.count, float(event.self_cpu_time_total)))
    return sorted(found, key=lambda kernel: -kernel.total_us)


def path_of(kernels: list[KernelTime]) -> Path:
    """The attention these kernels amount to."""
    names = [kernel.name.lower() for kernel in kernels]
    for path, marks, is_fast in PATHS:
        if any(mark in name for name in names for mark in marks):
            return Path(path, is_fast)
    return Path("no attention kernel recognised", False)
