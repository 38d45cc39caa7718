"""The self-test's judgement, and the echo server over real sockets. No time is asserted."""

from __future__ import annotations

import asyncio

from steelyard.bench.clients import Sent
from steelyard.bench.record import ClientStats, RequestRecord, TokenEvent, Usage
from steelyard.bench.selftest import EchoLoad, judge_echo, self_test

MS = 1_000_000


def sent(late_ms: float, cpu_s: float = 0.1, lost: int = 0) -> Sent:
    events = [TokenEvent(round((100 + 10 * i + (late_ms if i == 3 else 0)) * MS), "content", None, 1) for i in range(4)]
    record = RequestRecord(0, "echo", 0, 4, 4, send_ns=0, events=events, usage=Usage(4, 0, 4), done_ns=200 * MS)
    broken = [RequestRecord(i + 1, "echo", 0, 4, 4, failure="truncated") for i in range(lost)]
    return Sent([record, *broken], [], [ClientStats(cpu_s=cpu_s, wall_s=1.0)])


LOAD = EchoLoad(rate=1.0, events=4, gap_ms=10.0)


def test_a_late_a_lossy_and_a_busy_client_fail() -> None:
    assert judge_echo(sent(0.0), LOAD).ok
    assert not judge_echo(sent(80.0), LOAD).ok
    assert not judge_echo(sent(0.0, cpu_s=0.95), LOAD).ok
    assert judge_echo(sent(0.0, lost=1), LOAD).lost == 1 and not judge_echo(sent(0.0, lost=1), LOAD).ok


def test_a_gap_that_is_late_is_counted_in_milliseconds() -> None:
    found = judge_echo(sent(6.0), LOAD)
    assert found.tpot_error_ms == 2.0 and 5.0 < found.late_p99_ms <= 6.0


def test_the_echo_server_answers_every_request_whole() -> None:
    found = asyncio.run(self_test(EchoLoad(rate=40.0, events=5, gap_ms=1.0, seconds=0.5)))
    assert found.lost == 0 and found.events_per_s > 0
