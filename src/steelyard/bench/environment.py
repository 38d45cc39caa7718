"""Where a run happened: this machine, its GPU if it has one, and what the server says it runs with."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from steelyard.bench.scrape import Page, fetch, labelled
from steelyard.bench.target import Client

_GPU_FIELDS = (
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
    """CPU, memory, versions and GPUs of the machine the client runs on, JSON-ready; what is absent is None."""
    info = _read("/proc/cpuinfo")
    memory = re.search(r"MemTotal:\s+(\d+) kB", _read("/proc/meminfo"))
    name = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "steelyard": _version("steelyard"),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "cpu": name[1] if name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "governor": governor or None,
        "memory_bytes": int(memory[1]) * 1024 if memory else None,
        "load_average": list(os.getloadavg()),
        "gpus": gpus(),
    }


def gpus() -> list[dict[str, str]]:
    """One table a GPU as nvidia-smi prints it: clocks, power and throttle reasons are of this instant."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(_GPU_FIELDS, row)) for row in rows if len(row) == len(_GPU_FIELDS)]


async def server_facts(client: Client, page: Page) -> dict[str, Any]:
    """What the server says of itself: models, version, cache configuration. Parts it does not have are left out."""
    found: dict[str, Any] = {}
    for name, path in (("models", "/v1/models"), ("version", "/version"), ("server_info", "/server_info")):
        status, text = await fetch(client, path)
        if status == 200:
            try:
                found[name] = msgspec.json.decode(text)
            except msgspec.DecodeError:
                continue
    for name in ("vllm:cache_config_info", "steelyard:config_info"):
        for labels, _ in page.get(name, ()):
            found.setdefault("config", {}).update({k: v for k, v in labels.items() if k != "model_name"})
    states = labelled(page, "steelyard:kv_blocks", "state")
    if states:
        found["kv_blocks_total"] = states.get("total")
    return found


def model_of(facts: dict[str, Any]) -> tuple[str | None, str | None, int | None]:
    """(model id, owner, longest context) of the first model the server lists."""
    models = facts.get("models")
    data = models.get("data") if isinstance(models, dict) else None
    if not data:
        return None, None, None
    card = data[0]
    return card.get("id"), card.get("owned_by"), card.get("max_model_len")


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
