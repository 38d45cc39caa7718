"""Latencies of one request: the definitions, and what the usual short cuts would have said instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.bench.record import (
    Clock,
    RequestRecord,
    Slo,
    TokenEvent,
    Usage,
    read_records,
    spread,
    write_records,
)
from steelyard.errors import InvalidRequest

MS = 1_000_000


def record(times_ms: list[float], counts: list[int | None] | None = None, n: int | None = None) -> RequestRecord:
    counts = counts or [1] * len(times_ms)
    events = [TokenEvent(round(t * MS), "content", c, 4) for t, c in zip(times_ms, counts)]
    usage = Usage(completion_tokens=n if n is not None else sum(c or 0 for c in counts))
    return RequestRecord(0, "g", 0, 8, 8, send_ns=100 * MS, events=events, usage=usage, done_ns=10**12)


def test_b01_the_first_tokens_delay_is_in_no_gap() -> None:
    found = record([1100 + 10 * i for i in range(8)])
    assert found.ttft_ns() == 1000 * MS
    assert found.icl_ns() == [10 * MS] * 7
    assert found.itl_ns() == [10 * MS] * 7


def test_service_latency_starts_at_sending_and_user_latency_at_the_schedule() -> None:
    found = record([200, 300])
    assert (found.ttft_ns(Clock.SERVICE), found.ttft_ns(Clock.USER)) == (100 * MS, 200 * MS)
    assert (found.e2e_ns(Clock.SERVICE), found.e2e_ns(Clock.USER)) == (200 * MS, 300 * MS)
    assert found.delay_ns == 100 * MS


def test_end_to_end_ends_with_the_last_token_not_with_the_stream() -> None:
    assert record([200, 300]).e2e_ns() == 200 * MS


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 4, 2], [2, 1, 5]])
def test_token_gaps_sum_to_the_time_after_the_first_token(counts: list[int]) -> None:
    found = record([150, 180, 270], list(counts))
    e2e, ttft, n = found.e2e_ns(), found.ttft_ns(), found.num_tokens
    assert e2e is not None and ttft is not None and n == sum(counts)
    gaps = found.itl_ns()
    assert len(gaps) == n - 1
    assert sum(gaps) == pytest.approx(e2e - ttft)
    assert found.tpot_ns() == pytest.approx((e2e - ttft) / (n - 1))


def test_a_chunk_is_not_a_token() -> None:
    found = record([100, 140, 180], [4, 4, 4])
    assert found.tpot_ns() == pytest.approx(80 * MS / 11)
    assert found.icl_ns() == [40 * MS] * 2
    naive_tpot = 80 * MS / (len(found.events) - 1)
    assert naive_tpot > 5 * (found.tpot_ns() or 0)


def test_tokens_of_events_without_counts_are_spread_and_said_to_be_estimated() -> None:
    found = record([100, 140, 180], [None, None, None], n=10)
    assert sum(found.tokens_by_event()) == 10 and not found.counts_known
    assert record([100, 140], [None, None], n=2).counts_known


def test_b07_the_servers_usage_counts_and_not_retokenised_text() -> None:
    found = record([100, 140], [None, None], n=10)
    found.counted_tokens = 8
    assert found.num_tokens == 10
    found.usage = Usage()
    assert found.num_tokens == 8


def test_one_token_has_no_tpot() -> None:
    assert record([100]).tpot_ns() is None
    assert Slo(tpot_ms=1.0).met(record([100]), Clock.SERVICE)


def test_reasoning_counts_for_ttft_and_the_answer_for_ttfo() -> None:
    found = record([150, 250])
    found.events[0] = TokenEvent(150 * MS, "reasoning", 1, 3)
    assert (found.ttft_ns(), found.ttfo_ns()) == (50 * MS, 150 * MS)


def test_a_failed_request_meets_no_target() -> None:
    found = record([150, 250])
    assert Slo(ttft_ms=60).met(found, Clock.SERVICE) and not Slo(ttft_ms=60).met(found, Clock.USER)
    found.failure = "truncated"
    assert not Slo(ttft_ms=1e9).met(found, Clock.SERVICE)


def test_spread_keeps_the_sum_and_gives_each_part_one() -> None:
    for total, weights in ((10, [1, 1, 1]), (7, [0, 0, 5]), (3, [9, 1, 1]), (20, [0, 0])):
        parts = spread(total, weights)
        assert sum(parts) == total and min(parts) >= 1


def test_records_survive_their_file(tmp_path: Path) -> None:
    written = [record([150, 250]), record([150], [3])]
    write_records(tmp_path / "r.jsonl", written)
    assert read_records(tmp_path / "r.jsonl") == written
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(InvalidRequest, match=r"bad\.jsonl:1"):
        read_records(tmp_path / "bad.jsonl")
