"""What this machine and its libraries are, as plain values for a report. Nothing is measured and nothing is judged."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
LIBRARIES = ("triton", "flashinfer-python", "flash-attn", "numpy", "transformers")


def environment() -> dict[str, Any]:
    """Versions, CPU, GPU and CUDA, JSON-ready; what is absent is None."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "libraries": {name: _version(name) for name in LIBRARIES},
        "cpu": cpu(),
        "cuda": cuda(),
        "gpu": gpu(),
    }


def cpu() -> dict[str, Any]:
    """Model, cores, threads, instruction sets that matter to attention, and what torch uses of them."""
    text = _read("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return {
        "name": name[1] if name else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "features": {name: name in present for name in CPU_FEATURES},
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
    smi = _output(["nvidia-smi"]) if shutil.which("nvidia-smi") else ""
    nvcc = _output(["nvcc", "--version"]) if shutil.which("nvcc") else ""
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
