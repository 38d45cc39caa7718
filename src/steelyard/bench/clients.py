"""The processes that send: one by default, several when one cannot keep up. Each has its own loop and clock.

Monotonic clocks of different processes are never subtracted. All clients are told one wall-clock instant at which the
run begins; each finds it once on its own monotonic clock, and counts from there.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec
import uvloop

from steelyard.bench.arrivals import Arrivals, Schedule
from steelyard.bench.http import HttpClient
from steelyard.bench.load import LoadGenerator, LoadResult, OnProgress
from steelyard.bench.record import ClientStats, RequestRecord
from steelyard.bench.target import RequestShape, Target
from steelyard.bench.workload import PlannedRequest

_LAG_INTERVAL_S = 0.02
_START_DELAY_S = 2.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where to send, and how requests are written."""

    base_url: str
    shape: RequestShape
    api_key: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """The share of a load that one client sends."""

    own: int
    server: Server
    arrivals: Arrivals
    requests: tuple[PlannedRequest, ...]
    schedule: Schedule
    start_wall_ns: int


@dataclass(slots=True)
class Sent:
    """What clients bring back."""

    records: list[RequestRecord] = field(default_factory=list)
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    stats: list[ClientStats] = field(default_factory=list)


class RunClock:
    """Nanoseconds since the run's wall-clock instant, by this process's monotonic clock."""

    def __init__(self, start_wall_ns: int) -> None:
        self._start_ns = time.perf_counter_ns() + start_wall_ns - time.time_ns()
        self._start_wall_ns = start_wall_ns

    def __call__(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def wall_step_ns(self) -> int:
        """How far the wall clock has moved against the monotonic one since the start."""
        return time.time_ns() - self._start_wall_ns - self()


async def send_here(job: Job, on_progress: OnProgress = lambda progress: None) -> Sent:
    """Send a job from this process and loop."""
    clock = RunClock(job.start_wall_ns)
    http = HttpClient(job.server.base_url, clock, job.server.api_key)
    target = Target(http, job.server.shape, clock, job.server.timeout_s)
    generator = LoadGenerator(target, job.arrivals, clock, own=job.own, on_progress=on_progress)
    wait_s = -clock() / 1e9
    if wait_s > 0:
        await asyncio.sleep(wait_s)
    stats = ClientStats()
    watch = asyncio.create_task(_watch_lag(stats.lag_ns, clock))
    cpu_s, began_ns = time.process_time(), clock()
    try:
        result = await generator.run(job.requests, job.schedule)
    except asyncio.CancelledError:
        result = generator.result
        if not result.records:
            raise
    finally:
        watch.cancel()
        http.close()
    stats.cpu_s = time.process_time() - cpu_s
    stats.wall_s = (clock() - began_ns) / 1e9
    stats.wall_step_ns = clock.wall_step_ns()
    return _sent(result, stats)


def _sent(result: LoadResult, stats: ClientStats) -> Sent:
    return Sent(result.records, result.in_flight, [stats])


async def _watch_lag(lags: list[int], clock: Callable[[], int]) -> None:
    """How late this loop wakes: what every receive time may be off by."""
    while True:
        due_ns = clock() + round(_LAG_INTERVAL_S * 1e9)
        await asyncio.sleep(_LAG_INTERVAL_S)
        lags.append(max(clock() - due_ns, 0))


async def send(
    server: Server,
    arrivals: Arrivals,
    requests: Sequence[PlannedRequest],
    schedule: Schedule,
    *,
    processes: int = 1,
    start_wall_ns: int | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Sent:
    """Send a whole load from here, or spread over processes (progress is not shown then)."""
    if processes == 1:
        start = start_wall_ns if start_wall_ns is not None else time.time_ns()
        job = Job(0, server, arrivals, tuple(requests), schedule, start)
        return await send_here(job, on_progress)
    start = start_wall_ns if start_wall_ns is not None else time.time_ns() + round(_START_DELAY_S * 1e9)
    jobs = split(server, arrivals, requests, schedule, processes, start)
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = await asyncio.gather(*(loop.run_in_executor(pool, _run_job, job) for job in jobs))
    return merge([_decode(part) for part in parts])


def split(
    server: Server,
    arrivals: Arrivals,
    requests: Sequence[PlannedRequest],
    schedule: Schedule,
    processes: int,
    start_wall_ns: int,
) -> list[Job]:
    """Deal requests out in turn, those that follow another to its client; slots and caps are shared out."""
    owner: dict[int, int] = {}
    for number, request in enumerate(requests):
        owner[request.id] = number % processes if request.after is None else owner[request.after]
    jobs = []
    for own in range(processes):
        mine = tuple(r for r in requests if owner[r.id] == own)
        at_s = tuple(t for t, r in zip(schedule.at_s, requests) if owner[r.id] == own)
        slots = arrivals.concurrency
        if slots is not None:
            slots = slots // processes + (own < slots % processes)
        if mine and slots != 0:
            share = replace(arrivals, concurrency=slots)
            jobs.append(Job(own, server, share, mine, replace(schedule, at_s=at_s), start_wall_ns))
    return jobs


def merge(parts: Sequence[Sent]) -> Sent:
    """All records in order, in-flight counts added up."""
    records = sorted((r for part in parts for r in part.records), key=lambda r: r.id)
    changes: list[tuple[int, int]] = []
    for part in parts:
        before = 0
        for t_ns, level in part.in_flight:
            changes.append((t_ns, level - before))
            before = level
    changes.sort()
    level, curve = 0, []
    for t_ns, by in changes:
        level += by
        curve.append((t_ns, level))
    return Sent(records, curve, [s for part in parts for s in part.stats])


def _run_job(job: Job) -> bytes:
    """In a process of its own. Bytes come back: pickling a million small objects would take seconds."""
    sent = uvloop.run(send_here(job))
    return msgspec.msgpack.encode((sent.records, sent.in_flight, sent.stats))


def _decode(data: bytes) -> Sent:
    kind = tuple[list[RequestRecord], list[tuple[int, int]], list[ClientStats]]
    return Sent(*msgspec.msgpack.decode(data, type=kind))
