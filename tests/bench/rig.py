"""A server of known times under a virtual clock: bytes go through the real readers, nobody waits for anything.

VirtualLoop      an event loop whose clock jumps to the next timer
FakeServer       a bench client that answers with scripted stream bytes at scripted times
EventServer      the same bytes over a real socket, for what needs one
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from steelyard.bench.arrivals import Arrivals, Schedule, make_schedule
from steelyard.bench.http import Exchange, ResponseReader, TransportError
from steelyard.bench.load import LoadGenerator, LoadResult
from steelyard.bench.target import RequestShape, Target
from steelyard.bench.workload import PlannedRequest

T = TypeVar("T")
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while there is work, and jumps to the next timer when there is none."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def clock_ns() -> int:
    return round(asyncio.get_event_loop().time() * 1e9)


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def sse(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text_chunk(text: str, finish: str | None = None, ids: list[int] | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return sse({"choices": [choice]})


def usage_chunk(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return sse({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}})


@dataclass
class FakeServer:
    """Answers each request after `prefill_s`, one token every `gap_s`, `per_event` tokens an event.

    prelude      bytes sent at once, before any token (a role delta, a comment)
    honour_len   share of max_tokens that is really produced
    num_slots    requests served at a time; the others wait here, in the server
    fail         what to do with request number i instead: an exception, a status, or None
    """

    prefill_s: float = 0.1
    gap_s: float = 0.01
    per_event: int = 1
    prelude: bytes = b""
    honour_len: float = 1.0
    cached_tokens: int | None = 0
    extra_prompt_tokens: int = 0
    num_slots: int = 10_000
    usage: bool = True
    fail: Callable[[int], Any] = lambda number: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_in_flight: int = 0
    _now: int = 0
    _slots: asyncio.Semaphore | None = None

    async def exchange(self, exchange: Exchange) -> None:
        number = len(self.bodies)
        body = json.loads(exchange.body)
        self.bodies.append(body)
        self._slots = self._slots or asyncio.Semaphore(self.num_slots)
        exchange.sent_ns = clock_ns()
        self._now += 1
        self.most_in_flight = max(self.most_in_flight, self._now)
        try:
            async with self._slots:
                await self._answer(number, body, exchange)
        finally:
            self._now -= 1

    async def _answer(self, number: int, body: dict[str, Any], exchange: Exchange) -> None:
        failure = self.fail(number)
        if isinstance(failure, Exception):
            raise failure
        reader = ResponseReader(exchange)
        if isinstance(failure, int):
            reader.feed(b"HTTP/1.1 %d Oops\r\nContent-Length: 2\r\n\r\n{}" % failure, clock_ns())
            return
        reader.feed(HEAD, clock_ns())
        if self.prelude:
            reader.feed(chunked(self.prelude), clock_ns())
        left = max(round(body["max_tokens"] * self.honour_len), 1)
        completion = left
        delay_s = self.prefill_s
        while left > 0:
            await asyncio.sleep(delay_s)
            count = min(self.per_event, left)
            left -= count
            delay_s = self.gap_s * count
            reader.feed(chunked(text_chunk("word" * count, None if left else "length")), clock_ns())
            if failure == "cut" and left < completion // 2:
                raise TransportError("cut")
        await asyncio.sleep(0.5)  # usage and [DONE] come later than the last token, and count for nothing
        prompt = len(body["prompt"]) + self.extra_prompt_tokens
        tail = usage_chunk(prompt, completion, self.cached_tokens) if self.usage else b""
        reader.feed(chunked(tail + sse(b"[DONE]")) + b"0\r\n\r\n", clock_ns())
        assert reader.done


def run_load(
    server: FakeServer,
    requests: list[PlannedRequest],
    arrivals: Arrivals,
    schedule: Schedule | None = None,
    timeout_s: float = 600.0,
) -> LoadResult:
    """The whole load in virtual time, from 0 on."""

    async def main() -> LoadResult:
        target = Target(server, RequestShape("m"), clock_ns, timeout_s)
        generator = LoadGenerator(target, arrivals, clock_ns)
        return await generator.run(requests, schedule or make_schedule(arrivals, len(requests), 0))

    return run_virtually(main)


def plan(count: int, input_len: int = 8, output_len: int = 5, **fields: Any) -> list[PlannedRequest]:
    return [PlannedRequest(i, "g", tuple(range(i, i + input_len)), output_len, **fields) for i in range(count)]
