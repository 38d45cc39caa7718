"""Traps that measurements of servers have fallen into, and for each the test that the naive way would fail."""

from __future__ import annotations

import importlib

import pytest

from steelyard.bench.gates import Facts, Gate, judge
from tests.bench.rig import FakeServer
from tests.bench.test_gates import gate, report_of

TRAPS: dict[str, str] = {
    "1 coordinated omission": "bench.test_gates:test_coordinated_omission_is_seen_on_the_users_clock_and_named",
    "2 client saturation": "bench.test_gates:test_a_busy_client_a_late_loop_and_a_stepped_clock_are_seen",
    "3 chunk is not token": "bench.test_record:test_a_chunk_is_not_a_token",
    "4 first event is not first token": "bench.test_load:test_what_comes_before_the_first_token_is_no_token",
    "5 reasoning and tool channels": "bench.test_stream:test_reasoning_and_tool_calls_are_tokens",
    "6 length drift": "bench.test_gates:test_prompts_that_grew_on_the_way_are_invalid",
    "7 ignore_eos not honoured": "bench.test_gates:test_ignore_eos_not_honoured_or_padding_is_invalid",
    "8 prefix cache": "bench.test_gates:test_hits_in_a_cold_run_are_invalid_and_declared_ones_are_not",
    "9 warm-up": "bench.test_traps:test_a_run_that_was_still_warming_up_says_so",
    "10 opening wave": "bench.test_gates:test_opening_wave_is_reported_apart",
    "11 drain": "bench.test_gates:test_the_drain_is_outside_the_steady_window",
    "12 timeouts": "bench.test_gates:test_timeouts_stay_in_the_denominator_and_in_the_latencies",
    "13 burstiness and load": "bench.test_gates:test_burstiness_does_not_move_the_offered_rate",
    "14 absent metrics": "bench.test_gates:test_a_metric_that_is_absent_or_renamed_is_not_zero",
    "15 windows": "bench.test_gates:test_gauges_are_taken_over_the_runs_own_window",
    "16 GB and GiB": "plan.test_device:test_memory_is_what_drivers_report_neither_decimal_gb_nor_gib",
    "16 sparse and dense": "plan.test_device:test_peaks_are_dense_not_sparse",
    "17 several changes": (
        "bench.test_ablate:test_a_change_that_brings_another_along_is_void_unless_it_cannot_be_helped"
    ),
    "18 no effect": "bench.test_ablate:test_a_flag_without_effect_and_one_not_read_back_are_said",
    "18 different output": "quality.test_gate:test_longer_answers_void_a_claim_of_speed",
    "19 means of ratios": "bench.test_gates:test_mean_of_tpots_and_token_weighted_tpot_are_told_apart",
    "20 p99 of 100": "bench.test_gates:test_p99_of_a_hundred_is_marked",
    "21 drift": "bench.test_sweep:test_pairs_see_through_a_drift_that_hides_the_difference",
    "22 wall clock": "bench.test_gates:test_a_busy_client_a_late_loop_and_a_stepped_clock_are_seen",
    "23 zero-filled": "bench.test_record:test_one_token_has_no_tpot",
    "24 instruments": "bench.test_gates:test_a_server_that_watches_itself_is_not_compared_with_one_that_does_not",
    "25 tokenizers": (
        "bench.test_gates:test_a_client_that_counts_with_another_tokenizer_is_caught_by_the_servers_own_count"
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_has_its_test(trap: str) -> None:
    module, name = TRAPS[trap].split(":")
    assert callable(getattr(importlib.import_module(f"tests.{module}"), name))


def test_a_run_that_was_still_warming_up_says_so() -> None:
    """The first tenth waits for a compiler: its times are in every mean, and the mean says nothing of it."""
    server = FakeServer(prefill_s=0.1)
    report = report_of(server)
    assert gate(report, "warm-up")["outcome"] == "pass"
    slow = facts_of_warm(early=3.0, settled=True)
    assert slow.outcome == "warn" and "3.00 of the rest" in slow.evidence
    assert facts_of_warm(early=1.0, settled=False).outcome == "warn"


def facts_of_warm(early: float, settled: bool) -> Gate:
    summary = report_of(FakeServer())["summary"]
    return next(g for g in judge(Facts(summary, early_ttft_ratio=early, warmed_up=settled)) if g.name == "warm-up")
