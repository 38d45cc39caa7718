"""Each verdict from numbers that mean it, and not from numbers that almost do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.diagnose.knobs import ELSEWHERE, KNOBS, advice
from steelyard.diagnose.observation import Observation, share_at_cap, share_for_row
from steelyard.diagnose.sources import read_report
from steelyard.diagnose.verdict import NOTHING_RAN, diagnose
from steelyard.errors import InvalidRequest
from steelyard.plan.gain import KNOBS as GAINS

CALM = Observation("t", running=10, waiting=0, max_num_seqs=64, kv_usage=0.3, preemptions_per_s=0.0, attainment=1.0)
CASES = {
    "client": replace(CALM, asked_rate=100.0, achieved_rate=60.0, delay_s=2.0, waiting=0.0),
    "sequence cap (64)": replace(CALM, running=64, waiting=40, kv_usage=0.6),
    "KV capacity": replace(CALM, running=30, waiting=9, kv_usage=0.97, kv_usage_max=0.99, preemptions_per_s=0.5),
    "prefill compute": replace(CALM, queue_s=0.01, prefill_s=3.0, decode_s=0.5, mfu=0.55),
    "decode bandwidth": replace(CALM, step_s=0.012, floor_step_s=0.010, mbu=0.8),
    "host": replace(CALM, step_s=0.030, floor_step_s=0.004, mbu=0.13, mfu=0.02),
    "interference": replace(CALM, icl_p50_s=0.01, icl_p99_s=0.2, stalls_with_prefill=0.9),
    "fragmentation": replace(CALM, free_but_failed=5.0),
    "device": replace(CALM, busy=0.98),
    "nothing: not saturated": CALM,
}


@pytest.mark.parametrize("verdict", CASES)
def test_each_verdict_from_its_evidence(verdict: str) -> None:
    found = diagnose(CASES[verdict])
    assert found.verdict == verdict, found.text()
    if found.finding is not None:
        assert found.finding.evidence and found.finding.knob in found.text()


def test_a_full_pool_speaks_against_the_sequence_cap() -> None:
    found = diagnose(replace(CALM, running=64, waiting=40, kv_usage=0.97, kv_usage_max=1.0, preemptions_per_s=1.0))
    assert found.verdict == "KV capacity"


WAVES = replace(CALM, max_num_seqs=8, running=6.3, waiting=7.8, queue_s=4.8, prefill_s=1.0, busy=0.99)
"""Sequences that end together: the mean that runs is under 0.95 of the cap."""


def test_a_cap_is_named_though_fewer_run_on_the_mean() -> None:
    for seen in (replace(WAVES, waited_for_row=0.88), replace(WAVES, at_cap=0.7)):
        found = diagnose(seen)
        assert found.verdict == "sequence cap (8)" and [f.name for f in found.also] == ["device"], found.text()
        assert found.finding is not None and found.finding.knob == "a larger --max-num-seqs"
        assert "running 6.3 of 8" in found.text()
        full = diagnose(replace(seen, kv_usage_max=0.99))
        assert full.verdict == "sequence cap (8)" and "KV capacity" not in [f.name for f in full.also]


def test_a_wait_for_something_else_than_a_row_is_no_cap() -> None:
    for seen in (WAVES, replace(WAVES, waited_for_row=0.1, at_cap=0.9), replace(WAVES, at_cap=0.3)):
        assert diagnose(seen).verdict == "device"
    for_blocks = replace(WAVES, running=8, waited_for_row=0.1, kv_usage_max=0.99, preemptions_per_s=0.5)
    assert diagnose(for_blocks).verdict == "KV capacity"


def test_what_shows_a_cap_is_read_from_readings_and_from_accounts() -> None:
    running = [(0.0, 8.0), (1.0, 5.0), (2.0, 8.0), (3.0, 8.0), (4.0, 2.0), (5.0, 8.0)]
    waiting = [(0.0, 8.0), (1.0, 8.0), (2.0, 8.0), (3.0, 1.0), (4.0, 0.0), (6.0, 3.0)]
    assert share_at_cap(running, waiting, 8) == 0.75
    assert share_at_cap(running, waiting, None) is None and share_at_cap(running, [(4.0, 0.0)], 8) is None
    states = {"wait_slot": 3.0, "wait_kv": 0.5, "wait_step_boundary": 0.5, "decode": 90.0}
    assert share_for_row(states, 0.8, 10.0) == share_for_row(states, None, 10.0) == 0.75
    assert share_for_row(states, 0.81, 10.0) is None, "most of those that waited have not told yet"
    assert share_for_row({"decode": 1.0}, 0.0, 10.0) is None and share_for_row({"wait_kv": 1.0}, 0.1, 10.0) == 0.0


def test_a_queue_in_the_server_speaks_against_the_client() -> None:
    found = diagnose(replace(CASES["client"], running=64, waiting=30))
    assert found.verdict.startswith("sequence cap") and [f.name for f in found.also] == ["client"]


def test_what_was_not_read_decides_nothing() -> None:
    for unknown in (Observation("t"), Observation("t", waiting=50.0)):
        assert diagnose(unknown).verdict.startswith("not decided")


def test_a_busy_device_is_the_last_explanation() -> None:
    found = diagnose(replace(CASES["interference"], busy=0.99))
    assert (found.verdict, [f.name for f in found.also]) == ("interference", ["device"])
    assert diagnose(replace(CALM, busy=0.5)).verdict == "nothing: not saturated"


def test_a_zero_that_cannot_be_is_doubted() -> None:
    assert any("renamed" in d for d in diagnose(replace(CALM, kv_usage=0.0)).doubts)


@pytest.mark.parametrize(
    ("ttft", "tpot", "says"),
    [(9.0, 0.01, "TTFT is slow, TPOT is fine"), (0.1, 0.2, "TTFT is fine, TPOT is slow"), (9.0, 0.2, "both are slow")],
)
def test_stage_rules(ttft: float, tpot: float, says: str) -> None:
    found = diagnose(replace(CALM, ttft_s=ttft, tpot_s=tpot), slo_ms=(1000.0, 50.0))
    assert found.stage is not None and found.stage.name == says


def test_vllms_saved_result_is_read(tmp_path: Path) -> None:
    value = {
        "duration": 10.0, "completed": 100, "request_throughput": 10.0, "request_rate": 20.0, "max_concurrency": 16,
        "total_input_tokens": 2000, "total_output_tokens": 1000, "output_throughput": 100.0,
        "median_ttft_ms": 50.0, "median_tpot_ms": 5.0, "mean_e2el_ms": 1600.0,
    }  # fmt: skip
    path = tmp_path / "v.json"
    path.write_text(json.dumps(value))
    found = diagnose(read_report(path))
    assert found.verdict == "client" and found.finding is not None
    assert any("the client's cap is 16" in line for line in found.finding.evidence)
    path.write_text("[1]")
    with pytest.raises(InvalidRequest, match="object"):
        read_report(path)
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match="is no report"):
        read_report(path)
    with pytest.raises(InvalidRequest, match="--stage"):
        read_report(Path(__file__).parent / "audit_llama_h100.json", 9)


def test_a_late_p99_alone_is_no_verdict_on_the_client() -> None:
    """A garbage collection makes it; the rate that was asked was sent and nobody was held back."""
    seen = replace(CALM, asked_rate=100.0, achieved_rate=99.9, delay_s=0.05, waiting=0.0, client_cap=64, in_flight=8.0)
    found = diagnose(seen)
    assert found.verdict != "client"
    held = replace(seen, in_flight=63.0)
    assert diagnose(held).verdict == "client"


BEHIND_ITS_FLOOR = CASES["host"]
ON_CPU = {"attention_backend": "cpu", "enforce_eager": "False", "async_scheduling": "False"}


def test_a_device_that_computes_all_the_time_is_never_bound_by_its_host() -> None:
    found = diagnose(replace(BEHIND_ITS_FLOOR, busy=0.97))
    assert (found.verdict, found.also) == ("device", ())
    assert found.runner_up is not None and found.runner_up.name == "host"
    assert "it waits for no host" in found.text()
    assert diagnose(replace(BEHIND_ITS_FLOOR, busy=0.3)).verdict == "host"


def test_only_a_knob_that_this_server_can_turn_is_named() -> None:
    asked: list[str] = []

    def gain(flag: str, o: Observation) -> str:
        asked.append(flag)
        return f"so much by {flag}"

    for settings, knob in (
        ({}, "CUDA graphs (leave out --enforce-eager), or --async-scheduling"),
        ({"enforce_eager": "True", "async_scheduling": "True"}, "CUDA graphs (leave out --enforce-eager)"),
        ({"enforce_eager": "False", "async_scheduling": "False"}, "--async-scheduling"),
        (ON_CPU, ELSEWHERE["host"]),
    ):
        found = diagnose(replace(BEHIND_ITS_FLOOR, settings=settings), gain)
        assert found.finding is not None and found.finding.knob == knob
        assert (found.predicted is None) == ("CUDA graphs" not in knob), "a gain is of the knob that is named"
    assert asked == ["enforce_eager", "enforce_eager"]


@pytest.mark.parametrize(
    ("verdict", "settings", "gone"),
    [
        ("KV capacity", {"kv_cache_dtype": "fp8"}, "8-bit"),
        ("KV capacity", {"attention_backend": "sdpa", "kv_cache_dtype": "auto"}, "8-bit"),
        ("decode bandwidth", {"kv_cache_dtype": "fp8"}, "KV"),
        ("prefill compute", {"enable_prefix_caching": "True"}, "prefix caching"),
        ("device", {"enable_prefix_caching": "True"}, "prefix caching"),
        ("fragmentation", {"kv_allocation": "paged"}, "paged"),
    ],
)
def test_what_is_turned_already_is_not_advised(verdict: str, settings: dict[str, str], gone: str) -> None:
    before, after = (diagnose(replace(CASES[verdict], settings=s)).finding for s in ({}, settings))
    assert before is not None and after is not None
    assert gone in before.knob or verdict == "fragmentation"
    assert after.knob and gone not in after.knob


def test_every_verdict_has_something_to_try_whatever_the_settings_say() -> None:
    worst = {
        **ON_CPU, "kv_cache_dtype": "fp8", "enable_prefix_caching": "True", "kv_allocation": "paged",
    }  # fmt: skip
    for verdict, knobs in KNOBS.items():
        assert all(advice(verdict, settings)[0] for settings in ({}, ON_CPU, worst)), verdict
        assert {k.flag for k in knobs} - {""} <= set(GAINS), verdict


def test_a_server_without_work_is_said_to_have_had_none() -> None:
    idle = Observation(
        "t", running=0, waiting=0, max_num_seqs=64, output_tokens_per_s=0.0, input_tokens_per_s=0.0, busy=0.0
    )
    found = diagnose(idle, slo_ms=(500.0, 50.0))
    assert found.text() == f"Binding: {NOTHING_RAN}\n"
    for some in ({"running": 0.1}, {"output_tokens_per_s": 2.0}, {"waiting": 1.0}):
        assert "no request ran" not in diagnose(replace(idle, **some)).verdict
    assert "no request ran" not in diagnose(Observation("t", waiting=0.0)).verdict, "what was not read is not zero"


def test_targets_without_times_are_said_to_be_unanswered() -> None:
    found = diagnose(replace(CALM, tpot_s=0.01), slo_ms=(500.0, 50.0))
    assert found.stage is None and found.unread[-1].startswith("TTFT, so no stage")
    assert diagnose(replace(CALM, tpot_s=0.01)).unread == ()
