"""The load generator under a virtual clock: known server times are recovered exactly, and nothing hides a wait."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from steelyard.bench.arrivals import Arrivals, make_schedule, replay
from steelyard.bench.http import Exchange, TransportError
from steelyard.bench.load import LoadGenerator
from steelyard.bench.record import Clock
from steelyard.bench.target import RequestShape, Target
from tests.bench.rig import FakeServer, clock_ns, plan, run_load, run_virtually, sse

MS = 1_000_000


def test_every_latency_of_a_known_server_is_recovered() -> None:
    (record,) = run_load(FakeServer(prefill_s=0.25, gap_s=0.02), plan(1), Arrivals(concurrency=1)).records
    assert record.ok
    assert record.ttft_ns() == 250 * MS and record.e2e_ns() == 330 * MS
    assert record.tpot_ns() == 20 * MS and record.icl_ns() == [20 * MS] * 4 and record.itl_ns() == [20 * MS] * 4
    assert record.done_ns == 830 * MS
    assert (record.num_tokens, record.usage.prompt_tokens, record.finish_reason) == (5, 8, "length")


@pytest.mark.parametrize(
    "prelude",
    [
        sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        sse({"choices": [{"index": 0, "text": "", "finish_reason": None}]}),
        b": keep-alive\n\n",
        sse({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 0}}),
    ],
    ids=["role", "empty", "comment", "usage"],
)
def test_what_comes_before_the_first_token_is_no_token(prelude: bytes) -> None:
    (record,) = run_load(FakeServer(prelude=prelude), plan(1), Arrivals(concurrency=1)).records
    assert record.headers_ns == 0 and record.ttft_ns() == 100 * MS and len(record.events) == 5


def test_b03_the_wait_for_the_clients_own_cap_counts() -> None:
    arrivals = Arrivals("constant", rate=100.0, concurrency=1)
    server = FakeServer(prefill_s=0.1, gap_s=0.0)
    records = run_load(server, plan(20, output_len=1), arrivals).records
    last = records[-1]
    assert server.most_in_flight == 1
    assert last.e2e_ns(Clock.SERVICE) == 100 * MS
    delay, user = last.delay_ns, last.e2e_ns(Clock.USER)
    assert delay is not None and user == delay + 100 * MS
    assert user > 5000 * MS, "19 requests of 100 ms and their tails were waited for"


def test_open_loop_sends_when_due_however_slow_the_server() -> None:
    arrivals = Arrivals("constant", rate=10.0)
    records = run_load(FakeServer(prefill_s=30.0), plan(10), arrivals).records
    assert [r.send_ns for r in records] == [round((i + 1) * 0.1e9) for i in range(10)]
    assert {r.delay_ns for r in records} == {0}


def test_closed_loop_keeps_its_slots_busy_and_marks_the_opening_wave() -> None:
    server = FakeServer()
    result = run_load(server, plan(12), Arrivals(concurrency=4))
    assert server.most_in_flight == 4 and max(n for _, n in result.in_flight) == 4
    assert sum(r.opening for r in result.records) == 4
    assert all(r.delay_ns == 0 for r in result.records)


def test_a_ramp_spreads_the_opening_wave() -> None:
    records = run_load(FakeServer(prefill_s=9.0), plan(4), Arrivals(concurrency=4, ramp_s=2.0)).records
    assert [r.send_ns for r in records] == [0, 500 * MS, 1000 * MS, 1500 * MS]


def test_failures_are_kept_apart_and_in_the_record() -> None:
    def fail(number: int) -> object:
        return {0: 503, 1: 400, 2: TransportError("refused"), 3: "cut"}.get(number)

    records = run_load(FakeServer(fail=fail), plan(5), Arrivals(concurrency=1)).records
    assert [r.failure for r in records] == ["http_5xx", "http_4xx", "connection", "truncated", None]
    assert records[3].events, "the tokens before the cut are kept"


def test_a_timeout_is_a_failure_of_that_length_not_a_missing_request() -> None:
    slow = FakeServer(prefill_s=100.0)
    records = run_load(slow, plan(3), Arrivals("constant", rate=1.0), timeout_s=5.0).records
    assert [r.failure for r in records] == ["timeout"] * 3
    assert [(r.done_ns or 0) - r.sched_ns for r in records] == [5000 * MS] * 3


def test_what_was_never_sent_is_dropped_not_forgotten() -> None:
    async def main() -> list[str | None]:
        target = Target(FakeServer(prefill_s=10.0), RequestShape("m"), clock_ns, 60.0)
        arrivals = Arrivals("constant", rate=1.0, concurrency=1)
        generator = LoadGenerator(target, arrivals, clock_ns)
        requests = plan(6)
        task = asyncio.ensure_future(generator.run(requests, make_schedule(arrivals, 6, 0)))
        await asyncio.sleep(3.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [r.failure for r in generator.result.records]

    assert run_virtually(main) == ["dropped"] * 6


def test_a_turn_waits_for_the_one_before_it() -> None:
    first, second = plan(2)
    requests = [first, replace(second, after=0)]
    arrivals = Arrivals("trace", think_s=1.0)
    records = run_load(FakeServer(), requests, arrivals, replay([0.0, 0.1])).records
    assert records[0].done_ns is not None
    assert records[1].send_ns == records[0].done_ns + 1000 * MS == records[1].sched_ns


def test_the_generators_own_count_integrates_to_the_time_requests_were_in_flight() -> None:
    result = run_load(FakeServer(), plan(30), Arrivals("gamma", rate=9.0, burstiness=0.3))
    points = result.in_flight
    integral = sum(n * (b - a) for (a, n), (b, _) in pairwise(points))
    assert integral == sum((r.done_ns or 0) - (r.send_ns or 0) for r in result.records)


def test_a_late_event_loop_does_not_move_the_schedule() -> None:
    class Stalling(FakeServer):
        async def exchange(self, exchange: Exchange) -> None:
            if not self.bodies:
                asyncio.get_running_loop()._now_s += 1.0  # type: ignore[attr-defined]
            await super().exchange(exchange)

    records = run_load(Stalling(), plan(4), Arrivals("constant", rate=10.0)).records
    assert [r.sched_ns for r in records] == [100 * MS, 200 * MS, 300 * MS, 400 * MS]
    assert [r.delay_ns for r in records] == [1000 * MS, 900 * MS, 800 * MS, 700 * MS]


def test_a_timeout_runs_from_the_schedule_through_the_clients_own_wait() -> None:
    arrivals = Arrivals("constant", rate=1.0, concurrency=1)
    first, second = run_load(FakeServer(prefill_s=3.0), plan(2), arrivals, timeout_s=4.0).records
    assert first.ok and second.failure == "timeout"
    assert (second.delay_ns or 0) > 0 and (second.done_ns or 0) - second.sched_ns == 4000 * MS
