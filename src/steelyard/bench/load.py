"""The load generator: sends a plan of requests on time and keeps every record. One event loop; clock and client given.

open loop     each request is due at an absolute time; waiting for a cap's slot counts, since `sched` is the due time
closed loop   each slot sends its next request when its last has ended; slots begin over the ramp
turns         a request that follows another is due when that one has ended, whatever the process
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from steelyard.bench.arrivals import Arrivals, Schedule
from steelyard.bench.record import RequestRecord
from steelyard.bench.target import Target
from steelyard.bench.workload import PlannedRequest

OnProgress = Callable[["Progress"], None]


@dataclass(slots=True)
class Progress:
    """What a display shows while a load runs."""

    total: int
    sent: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class LoadResult:
    """Every record, the in-flight count at each change as the generator itself counted it, and answers if kept."""

    records: list[RequestRecord]
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    answers: dict[int, tuple[list[int], str]] = field(default_factory=dict)


class LoadGenerator:
    """Runs one load. `clock` is in nanoseconds since the run began; `own` is this client's number."""

    def __init__(
        self,
        target: Target,
        arrivals: Arrivals,
        clock: Callable[[], int],
        *,
        own: int = 0,
        keep_answers: bool = False,
        on_progress: OnProgress = lambda progress: None,
    ) -> None:
        self._target, self._arrivals, self._clock = target, arrivals, clock
        self._own, self._keep, self._on_progress = own, keep_answers, on_progress
        cap = arrivals.concurrency if arrivals.open else None
        self._cap = asyncio.Semaphore(cap) if cap is not None else None
        self.result = LoadResult([])

    async def run(self, requests: Sequence[PlannedRequest], schedule: Schedule) -> LoadResult:
        """Send all; returns when each has ended. Cancelling records what was not sent as dropped."""
        self._progress = Progress(len(requests))
        self._bodies = {r.id: self._target.shape.body(r) for r in requests}
        self._ended = {r.id: asyncio.Event() for r in requests}
        self._seen: set[int] = set()
        try:
            if self._arrivals.open:
                await self._open(requests, schedule)
            else:
                await self._closed(requests)
        finally:
            now_ns = self._clock()
            for request in requests:
                if request.id not in self._seen:
                    self._record(request, now_ns)
            for record in self.result.records:
                if record.ok and record.done_ns is None:
                    record.failure, record.detail = "dropped", "the run was stopped before it ended"
            self.result.records.sort(key=lambda r: r.id)
        return self.result

    async def _open(self, requests: Sequence[PlannedRequest], schedule: Schedule) -> None:
        start_ns = self._clock()
        async with asyncio.TaskGroup() as tasks:
            for request, at_s in zip(requests, schedule.at_s, strict=True):
                due_ns = start_ns + round(at_s * 1e9)
                if request.after is None:
                    await self._sleep_until(due_ns)
                    tasks.create_task(self._due(request, due_ns))
                else:
                    tasks.create_task(self._follow(request, due_ns))

    async def _follow(self, request: PlannedRequest, due_ns: int) -> None:
        """A later turn: due at its time, or a think time after the turn before it, whichever is later."""
        assert request.after is not None
        await self._ended[request.after].wait()
        due_ns = max(due_ns, self._clock() + round(self._arrivals.think_s * 1e9))
        await self._sleep_until(due_ns)
        await self._due(request, due_ns)

    async def _due(self, request: PlannedRequest, due_ns: int) -> None:
        record = self._record(request, due_ns)
        if self._cap is None:
            await self._send(request, record)
            return
        async with self._cap:
            await self._send(request, record)

    async def _closed(self, requests: Sequence[PlannedRequest]) -> None:
        queue = deque(requests)
        slots = self._arrivals.concurrency or 1
        start_ns = self._clock()
        async with asyncio.TaskGroup() as tasks:
            for slot in range(min(slots, len(queue))):
                begin_ns = start_ns + round(self._arrivals.ramp_s * 1e9 * slot / slots)
                tasks.create_task(self._slot(queue, begin_ns))

    async def _slot(self, queue: deque[PlannedRequest], begin_ns: int) -> None:
        await self._sleep_until(begin_ns)
        opening = True
        while queue:
            request = queue.popleft()
            if request.after is not None:
                await self._ended[request.after].wait()
            if not opening and self._arrivals.think_s:
                await asyncio.sleep(self._arrivals.think_s)
            record = self._record(request, self._clock())
            record.opening = opening
            opening = False
            await self._send(request, record)

    def _record(self, request: PlannedRequest, due_ns: int) -> RequestRecord:
        self._seen.add(request.id)
        record = RequestRecord(
            id=request.id,
            group=request.group,
            sched_ns=due_ns,
            asked_prompt_tokens=len(request.prompt_ids),
            asked_output_tokens=request.output_len,
            client=self._own,
        )
        self.result.records.append(record)
        return record

    async def _send(self, request: PlannedRequest, record: RequestRecord) -> None:
        self._changed(1)
        self._progress.sent += 1
        try:
            reader = await self._target.send(self._bodies.pop(request.id), record)
        finally:
            self._changed(-1)
            self._ended[request.id].set()
            self._progress.done += 1
            self._progress.failed += not record.ok
            self._progress.output_tokens += record.num_tokens or 0
            self._on_progress(self._progress)
        if self._keep:
            self.result.answers[request.id] = (reader.token_ids, "".join(reader.text))

    def _changed(self, by: int) -> None:
        self._progress.in_flight += by
        self.result.in_flight.append((self._clock(), self._progress.in_flight))

    async def _sleep_until(self, at_ns: int) -> None:
        """Sleep to an absolute time: relative sleeps drift by their own overhead."""
        while (left_ns := at_ns - self._clock()) > 0:
            await asyncio.sleep(left_ns / 1e9)
