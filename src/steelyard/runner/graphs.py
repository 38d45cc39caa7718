"""Captured steps: which sizes are worth capturing, how one is captured, and the same by plain calls without a GPU.

    decode  R rows of one token        row buckets up to max_rows
    mixed   T tokens of any rows       token buckets, while launching a step takes longer than running it
    head    S sampled rows             logits, sampling, tokens into the state; by temperature alone, or with cuts

A step runs in the smallest bucket that holds it; the rest is padding, and is counted. Largest first into one memory
pool, so that every smaller graph lives in the memory of the largest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

LAYER_LAUNCH_S = 850e-6
"""Host time to launch one layer from Python, measured beside an H200: a step of 28 layers took 24 ms."""
FLOPS = 600e12
FEW_TOKENS = 64
"""From here on kernels have the same form whatever the number of tokens."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ascending sizes. `mixed` empty: steps with prefills are never captured."""

    decode: tuple[int, ...]
    mixed: tuple[int, ...]

    @classmethod
    def of(cls, max_rows: int, max_tokens: int, num_layers: int, layer_elements: int) -> Buckets:
        """`layer_elements`: weights of all layers, which set how long a token takes."""
        launch_bound = int(num_layers * LAYER_LAUNCH_S * FLOPS / (2 * max(layer_elements, 1)))
        limit = min(max_tokens, max(launch_bound, 2 * max_rows))
        mixed = [size for size in _sizes(limit, 32) if size >= 32 or size == limit]
        return cls(tuple(_sizes(max_rows, 8)), tuple(mixed))


def _sizes(largest: int, fine: int) -> list[int]:
    """1, 2, 4 .. `fine`, then eight steps an octave at multiples of `fine`, then `largest` itself."""
    sizes = [2**k for k in range(20) if 2**k < min(fine, largest)]
    size = fine
    while size < largest:
        sizes.append(size)
        size += max(fine, 2 ** (size.bit_length() - 4))
    return [*sizes, largest]


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
