"""The client against an echo server first: can this machine see gaps of this length, at this rate, on time?

The echo server is a process of its own that computes nothing: it answers a completion with `max_tokens` events, one
every gap, written at absolute times, each with the time it was written. What the client adds is what a run would add.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from steelyard.bench.arrivals import Arrivals, make_schedule
from steelyard.bench.clients import Sent, Server, deaf_to_interrupts, send
from steelyard.bench.record import RequestRecord
from steelyard.bench.stats import quantile_of
from steelyard.bench.target import RequestShape
from steelyard.bench.workload import PlannedRequest

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LATE_LIMIT_MS = 5.0
CPU_LIMIT = 0.9


@dataclass(frozen=True, slots=True)
class EchoLoad:
    """What the self-test sends: as many requests a second, events a request and gaps as the run will see."""

    rate: float
    events: int = 64
    gap_ms: float = 10.0
    seconds: float = 3.0
    processes: int = 1


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the client saw of the echo server; `ok`: it was on time, lost nothing and had CPU to spare."""

    rate: float
    events_per_s: float
    tpot_error_ms: float
    late_p50_ms: float
    late_p99_ms: float
    cpu_share: float
    lost: int
    ok: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def self_test(load: EchoLoad) -> SelfTest:
    """Start an echo server, send, compare. Some seconds."""
    count = max(round(load.rate * load.seconds), 8)
    requests = [PlannedRequest(i, "echo", (1, 2, 3, 4), load.events) for i in range(count)]
    arrivals = Arrivals("constant", rate=load.rate)
    async with echo_server(load.gap_ms) as url:
        server = Server(url, RequestShape("echo"), timeout_s=60.0)
        sent = await send(server, arrivals, requests, make_schedule(arrivals, count, 0), processes=load.processes)
    return judge_echo(sent.whole(), load)


def judge_echo(sent: Sent, load: EchoLoad) -> SelfTest:
    """Lateness of an event: how much longer after the first event it came than the echo server waited."""
    late: list[float] = []
    errors: list[float] = []
    good = [r for r in sent.records if r.ok and len(r.events) == load.events]
    for record in good:
        late += _lateness_ms(record, load.gap_ms)
        if (tpot := record.tpot_ns()) is not None:
            errors.append(abs(tpot / 1e6 - load.gap_ms))
    late.sort()
    seconds = max(s.wall_s for s in sent.stats)
    cpu = max(s.cpu_share for s in sent.stats)
    p99 = quantile_of(late, 0.99) if late else float("inf")
    lost = len(sent.records) - len(good)
    return SelfTest(
        rate=load.rate,
        events_per_s=sum(len(r.events) for r in good) / seconds,
        tpot_error_ms=max(errors, default=0.0),
        late_p50_ms=quantile_of(late, 0.5) if late else float("inf"),
        late_p99_ms=p99,
        cpu_share=cpu,
        lost=lost,
        ok=lost == 0 and p99 <= LATE_LIMIT_MS and cpu <= CPU_LIMIT,
    )


def _lateness_ms(record: RequestRecord, gap_ms: float) -> list[float]:
    first = record.events[0].t_ns
    return [abs((e.t_ns - first) / 1e6 - i * gap_ms) for i, e in enumerate(record.events)]


@asynccontextmanager
async def echo_server(gap_ms: float) -> AsyncIterator[str]:
    """An echo server in a process of its own; yields its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, gap_ms), daemon=True)
    with deaf_to_interrupts():
        process.start()
    try:
        port = await asyncio.to_thread(ours.recv)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


def _serve(pipe: Connection, gap_ms: float) -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: _echo(r, w, gap_ms), "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gap_ms: float) -> None:
    """Requests on one connection until it closes."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(h[15:]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:"))
            await _answer(writer, json.loads(await reader.readexactly(length)), gap_ms)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _answer(writer: asyncio.StreamWriter, body: dict[str, Any], gap_ms: float) -> None:
    count = int(body["max_tokens"])
    writer.write(_HEAD)
    start_ns = time.perf_counter_ns()
    for i in range(count):
        wait_s = (start_ns + round((i + 1) * gap_ms * 1e6) - time.perf_counter_ns()) / 1e9
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        finish = b'"length"' if i == count - 1 else b"null"
        _chunk(writer, b'{"choices":[{"index":0,"text":"a","finish_reason":%b}]}' % finish)
    usage = b'{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (len(body["prompt"]), count)
    _chunk(writer, usage)
    _chunk(writer, b"[DONE]")
    writer.write(b"0\r\n\r\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    data = b"data: " + data + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
