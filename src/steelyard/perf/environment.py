"""What torch knows of this machine, beside the record all reports carry. Nothing is measured and nothing is judged."""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch

from steelyard.core import environment as machine


def environment() -> dict[str, Any]:
    """The common record, and what torch makes of CPU, GPU and CUDA, JSON-ready; what is absent is None."""
    return machine.environment() | {
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": cuda(),
        "gpu": gpu(),
    }


def gpu() -> dict[str, Any] | None:
    """The current CUDA device, or None."""
    if not torch.cuda.is_available():
        return None
    props = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": props.name,
        "capability": f"{props.major}.{props.minor}",
        "architecture": architecture(props.major, props.minor),
        "multiprocessors": props.multi_processor_count,
        "memory_bytes": props.total_memory,
        "l2_bytes": props.L2_cache_size,
        "count": torch.cuda.device_count(),
    }


def cuda() -> dict[str, Any]:
    """The three CUDA versions that may disagree: torch's runtime, the most the driver can run, and nvcc's."""
    smi = machine.output_of(["nvidia-smi"])
    nvcc = machine.output_of(["nvcc", "--version"])
    driver = re.search(r"Driver Version:\s*([\d.]+)", smi)
    supports = re.search(r"CUDA Version:\s*([\d.]+)", smi)
    release = re.search(r"release ([\d.]+)", nvcc)
    return {
        "runtime": torch.version.cuda,
        "driver": driver[1] if driver else None,
        "driver_supports": supports[1] if supports else None,
        "nvcc": release[1] if release else None,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
    }


def architecture(major: int, minor: int) -> str:
    """The name of a CUDA compute capability's generation."""
    if (major, minor) == (8, 9):
        return "Ada"
    names = {7: "Volta or Turing", 8: "Ampere", 9: "Hopper", 10: "Blackwell", 11: "Blackwell", 12: "Blackwell"}
    return names.get(major, "unknown")


def why_not_importable(module: str) -> str | None:
    """None if the module imports here, else what stops it, in one line."""
    try:
        importlib.import_module(module)
    except Exception as error:  # an optional library can fail in any way while it loads: each is an answer
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return None
