"""Shared by all tests: what was left out, and why, is said at the end of every run."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if not os.path.exists("/dev/nvidiactl"):
    # Without a GPU, Triton kernels run in its interpreter; the choice is made when triton is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

_left_out: dict[str, list[str]] = {"gpu": [], "slow": []}


def pytest_configure() -> None:
    """A shell starts what it sends to the background with SIGINT ignored, and processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("steady", derandomize=True, deadline=None)  # the same examples in every run
    settings.load_profile("steady")


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, names in _left_out.items():
            if item.get_closest_marker(mark):
                names.append(item.nodeid.split("[")[0])
                break


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for mark, how in (("gpu", "need a CUDA device: make test-gpu"), ("slow", "long tier: make test-all")):
        names = Counter(_left_out[mark])
        if names:
            terminalreporter.write_line(f"{sum(names.values())} tests not run ({how}):")
            for name, count in sorted(names.items()):
                terminalreporter.write_line(f"    {name}" + (f" x {count}" if count > 1 else ""))
