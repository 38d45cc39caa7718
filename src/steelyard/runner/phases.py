"""The clock and the scales of a start: seconds of each phase, and memory at named moments. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class Phases:
    """`with phases("weights"): ...` times a phase, the device's work included; one inside another is its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._inner_s = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer_s, self._inner_s = self._inner_s, 0.0
        self.seconds.setdefault(name, 0.0)
        began = time.monotonic()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        took_s = time.monotonic() - began
        self.seconds[name] += took_s - self._inner_s
        self._inner_s = outer_s + took_s

    def free_bytes(self) -> int:
        """Device memory that nobody has taken; what the allocator holds without need is given back first."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def table(self) -> str:
        """One line: each phase with its seconds."""
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())


def resident_bytes() -> int | None:
    """What this process holds of the host's memory, files that are mapped not counted; None where nothing says so."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)
