"""The processes that send: one by default, several when one cannot keep up. Each has its own loop and clock.

Monotonic clocks of different processes are never subtracted. All clients are told one wall-clock instant at which the
run begins; each finds it once on its own monotonic clock, and counts from there.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import msgspec
import uvloop

from steelyard.bench.arrivals import Arrivals, Schedule
from steelyard.bench.http import HttpClient
from steelyard.bench.load import LoadGenerator, OnProgress
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
    """What clients bring back. `stopped`: the load was cancelled, and what had not ended is recorded as dropped."""

    records: list[RequestRecord] = field(default_factory=list)
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    stats: list[ClientStats] = field(default_factory=list)
    stopped: bool = False

    def whole(self) -> Sent:
        """Itself; raises CancelledError if it is a part, for whom a part is of no use."""
        if self.stopped:
            raise asyncio.CancelledError
        return self


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
    """Send a job from this process and loop. Cancelled once it has begun, it returns what there is."""
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
    stopped = False
    try:
        result = await generator.run(job.requests, job.schedule)
    except asyncio.CancelledError:
        result, stopped = generator.result, True
        if not result.records:
            raise
        _take_back_cancel()
    finally:
        watch.cancel()
        http.close()
    stats.cpu_s = time.process_time() - cpu_s
    stats.wall_s = (clock() - began_ns) / 1e9
    stats.wall_step_ns = clock.wall_step_ns()
    return Sent(result.records, result.in_flight, [stats], stopped)


def _take_back_cancel() -> None:
    """The running task ends in order in place of by CancelledError."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


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
    with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        return await _send_there(pool, jobs)


async def _send_there(pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> Sent:
    loop, stopped = asyncio.get_running_loop(), False
    with deaf_to_interrupts():
        parts = [loop.run_in_executor(pool, _run_job, job) for job in jobs]
    try:
        await asyncio.wait(parts)
    except asyncio.CancelledError:
        stopped = True
        for child in multiprocessing.active_children():
            child.terminate()
        await asyncio.wait(parts)
    found = await asyncio.gather(*parts, return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):  # one that was stopped may not have begun
            raise asyncio.CancelledError if stopped else error
    if stopped:
        _take_back_cancel()
    return replace(merge([_decode(part) for part in found if isinstance(part, bytes)]), stopped=stopped)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started inside never hear a Ctrl-C, which a terminal sends to all of them: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    sent = uvloop.run(_until_terminated(job))
    return msgspec.msgpack.encode((sent.records, sent.in_flight, sent.stats))


async def _until_terminated(job: Job) -> Sent:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await send_here(job)


def _decode(data: bytes) -> Sent:
    kind = tuple[list[RequestRecord], list[tuple[int, int]], list[ClientStats]]
    return Sent(*msgspec.msgpack.decode(data, type=kind))
