"""How long a call takes and how much memory it needs beside its inputs; and the machine's ceilings, by the same clock.

On CUDA a call is captured into a graph and replayed, so that launches from Python do not count; what cannot be captured
is timed by events. On a CPU it is called in a loop. Times are medians.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
GRAPH_MS = 20.0
"""Milliseconds that one replayed graph lasts at least: short bursts run at higher clocks than a server ever sees."""
MAX_NODES = 400


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best this machine does in this run: FLOP/s of a large matrix product, bytes/s of reading and of copying."""

    dtype: str
    matmul_flops: float
    read_bandwidth: float
    copy_bandwidth: float


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Where everything that is timed must run, the forward of a timed backward too: autograd stays on its stream, and
    only a stream that is not the default one can be captured. Nothing on a CPU."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def median_ms(calls: Sequence[Call], device: torch.device, budget_s: float = 0.25) -> float:
    """Median milliseconds of one call. `calls` do the same over different buffers and are taken in turn. On CUDA the
    caller is inside `own_stream`."""
    if device.type == "cuda":
        return _cuda_ms(calls, budget_s)
    calls[0]()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter_ns()
        calls[len(times) % len(calls)]()
        times.append((time.perf_counter_ns() - start) / 1e6)
    return sorted(times)[len(times) // 2]


def extra_bytes(call: Call, device: torch.device) -> int:
    """The most memory that was live beyond what was live before the call, its result included.

    On a CPU it is the running sum of the profiler's allocations: scratch inside one operator does not show.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    live = most = 0
    for event in sorted(seen.events(), key=lambda e: e.time_range.start):
        live += event.self_cpu_memory_usage
        most = max(most, live)
    return most


def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """Measure the ceilings a kernel is held against. Sizes fit the device: seconds on a GPU, about one on a CPU."""
    n, num_bytes = (8192, 2**30) if device.type == "cuda" else (1024, 2**26)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    matmul_s = median_ms([lambda: a @ b], device) / 1e3
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = median_ms([lambda: target.copy_(source)], device) / 1e3
    read_s = median_ms([lambda: torch.amax(source)], device) / 1e3
    name = str(dtype).removeprefix("torch.")
    return Ceiling(name, 2 * n**3 / matmul_s, num_bytes / read_s, 2 * num_bytes / copy_s)


def clear(device: torch.device) -> None:
    """Give cached memory back, so that one case's leftovers are not another's shortage."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _cuda_ms(calls: Sequence[Call], budget_s: float) -> float:
    stream = torch.cuda.current_stream()
    assert stream != torch.cuda.default_stream(), "the default stream cannot be captured: use own_stream"
    for call in calls:
        call()
    one_ms = max(_event_ms([calls[0]] * 3, stream) / 3, 1e-3)
    rounds = min(max(1, round(GRAPH_MS / one_ms)), MAX_NODES)
    sequence = [calls[i % len(calls)] for i in range(max(rounds, len(calls)))]
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in sequence:
                call()
        replay: Call = graph.replay
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:  # not capturable: events around the plain calls

        def replay() -> None:
            for call in sequence:
                call()

    replay()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 50):
        times.append(_event_ms([replay], stream) / len(sequence))
    return sorted(times)[len(times) // 2]


def _event_ms(calls: Sequence[Call], stream: torch.cuda.Stream) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    for call in calls:
        call()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end))
