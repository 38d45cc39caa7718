"""Where a figure was taken: this machine and its libraries, as plain values for a report. No torch; nothing is judged.

`perf.environment` adds what only torch knows. Reports of `bench serve`, the benchmarks and `perf` all carry these keys.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("steelyard", "torch", "triton", "flashinfer-python", "flash-attn", "numpy", "transformers")
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
GPU_FIELDS = (
    "name",
    "memory.total",
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "ecc.mode.current",
    "mig.mode.current",
    "clocks_throttle_reasons.active",
)


def environment() -> dict[str, Any]:
    """Platform, versions, CPU, memory, load and GPUs, JSON-ready; what is absent is None. `cores` are those this
    process may use; `cpu_features` the instruction sets of `CPU_FEATURES` it has."""
    info = _read("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", info, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    memory = re.search(r"MemTotal:\s+(\d+) kB", _read("/proc/meminfo"))
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{library: _version(library) for library in LIBRARIES},
        "cpu": name[1] if name else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_features": [feature for feature in CPU_FEATURES if feature in present],
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
        "memory_bytes": int(memory[1]) * 1024 if memory else None,
        "load_average": list(os.getloadavg()),
        "gpus": gpus(),
    }


def gpus() -> list[dict[str, str]]:
    """One table a GPU as nvidia-smi prints it: clocks, power and throttle reasons are of this instant."""
    text = output_of(["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"])
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(GPU_FIELDS, row)) for row in rows if len(row) == len(GPU_FIELDS)]


def output_of(command: list[str]) -> str:
    """What a program of this machine prints; empty if it is not there or does not answer in 20 s."""
    if not shutil.which(command[0]):
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
