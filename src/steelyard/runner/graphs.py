"""Captured steps: how one is captured, and the same by plain calls without a GPU. Which sizes: plan/captures.py.

Padding up to a size is counted. Largest first into one memory pool, so that every smaller graph lives in the memory of
the largest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import torch

FEW_TOKENS = 64
"""From here on kernels have the same form whatever the number of tokens."""


def bucket_for(sizes: tuple[int, ...], size: int) -> int | None:
    """The smallest bucket that holds `size`, or None."""
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else None


class Graph(Protocol):
    """A captured function of no arguments."""

    def replay(self) -> None: ...


class Called:
    """No capture: replaying calls the function again. On fixed buffers the two must not differ."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function


class Captures:
    """Captures functions one after another into one memory pool. On a CPU they are kept as calls."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None

    def capture(self, function: Callable[[], None], warm: bool = True) -> Graph:
        """Record a function. `warm` runs it before: a kernel that is compiled or loaded while recording breaks it."""
        if not self._on_gpu:
            return Called(function)
        if warm:
            function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph
