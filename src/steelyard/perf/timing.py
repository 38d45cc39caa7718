"""How long a call takes and how much memory it needs beside its inputs.

On CUDA a call is captured into a graph and replayed, so that launches from Python do not count; what cannot be captured
is timed by events. On a CPU it is called in a loop. Times are medians, but for `best_ms`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from steelyard.perf.profile_kernels import is_no_marker, standard_error

Call = Callable[[], object]
GRAPH_MS = 20.0
"""Milliseconds that one replayed graph lasts at least: short bursts run at higher clocks than a server ever sees."""
MAX_NODES = 400


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


def best_ms(call: Call, budget_s: float = 0.5) -> float:
    """Milliseconds of the fastest of the calls that a budget of time holds, at least three. For a CPU."""
    call()
    best, count, end = float("inf"), 0, time.perf_counter() + budget_s
    while count < 3 or time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        best, count = min(best, (time.perf_counter_ns() - start) / 1e6), count + 1
    return best


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
    with standard_error(is_no_marker), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    live = most = 0
    for event in sorted(seen.events(), key=lambda e: e.time_range.start):
        live += event.self_cpu_memory_usage
        most = max(most, live)
    return most


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
