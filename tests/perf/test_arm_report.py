"""Arms of an ablation: parts sum to the wall time, predictions are plan's, and a change is split without remainder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.perf.arm_report import (
    PARTS,
    arms_table,
    changes,
    changes_tables,
    parts,
    phases,
    predicted_s,
    why_unpredicted,
)
from steelyard.plan.fit import evaluate, fit
from steelyard.plan.records import StepRecord
from tests.plan.setups import make_roofline

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROOFLINE = make_roofline("qwen3-0.6b")


def kept(kind: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (RESULTS / "h200-steps.jsonl").read_text().splitlines())
    return [r for r in rows if r["workload"].startswith(f"qwen3-0.6b {kind}") and " batch " not in r["workload"]]


def test_parts_of_measured_steps_sum_to_the_wall_time_and_decodes_are_bound_by_memory() -> None:
    steps = kept("single 128")
    found = parts(steps, ROOFLINE, 0.2)
    assert tuple(found) == PARTS and sum(found.values()) == pytest.approx(0.2)
    assert 0.5 * 257 * 0.25e-3 < found["memory floor"] < sum(s["device_ns"] for s in steps) / 1e9
    assert found["memory floor"] > 20 * found["compute floor"] and found["above the floor"] > 0
    assert found["gaps"] == pytest.approx(sum(s["gap_ns"] for s in steps[1:]) / 1e9)


def test_prompts_are_bound_by_arithmetic_and_a_step_under_its_floor_is_all_floor() -> None:
    step = {"device_ns": 10**9, "gap_ns": 0, "prefill_tokens": 8192, "prefill_rows": 2, "prefill_context_sum": 8192}
    found = parts([step], ROOFLINE, 1.0)
    assert found["compute floor"] > 10 * found["memory floor"] > 0
    short = parts([step | {"device_ns": 1000}], ROOFLINE, 1e-6)
    assert short["compute floor"] + short["memory floor"] == pytest.approx(1e-6)
    assert short["above the floor"] == pytest.approx(0.0, abs=1e-12)
    unknown = parts([step], None, 1.5)
    assert unknown["above the floor"] == 1.0 and unknown["residual"] == pytest.approx(0.5)


def test_the_prediction_is_the_calibrated_model_over_contents_and_does_not_see_times() -> None:
    calibration = fit(ROOFLINE, [StepRecord.from_json(r) for r in kept("single") + kept("short-short")])
    steps = kept("mixed")
    (errors,) = evaluate(ROOFLINE, calibration, [StepRecord.from_json(r) for r in steps]).values()
    found = predicted_s(steps, ROOFLINE, calibration)
    assert found == pytest.approx(errors.predicted_s) == pytest.approx(errors.measured_s, rel=0.1)
    assert predicted_s([s | {"device_ns": 1} for s in steps], ROOFLINE, calibration) == found


def test_what_plan_has_no_term_for_is_named() -> None:
    captured = {"attention_backend": "triton", "enforce_eager": False, "device": "cuda"}
    assert why_unpredicted(captured) == ""
    assert why_unpredicted(captured | {"attention_backend": "naive", "enforce_eager": True}) == "gathered attention"
    assert why_unpredicted(captured | {"enforce_eager": True}) == "launches"
    assert why_unpredicted(captured | {"attention_backend": "cpu", "device": "cpu"}) == "no such device"


def test_phases_are_the_first_step_and_the_middle_of_the_later_half() -> None:
    steps = [{"device_ns": n * 10**6, "gap_ns": 10**6} for n in (99, 50, 7, 3, 5)]
    assert phases(steps) == {"first_step_ms": 100.0, "decode_step_ms": 6.0}


def row(seconds: float, floor_s: float, wait_ms: float, **more: Any) -> dict[str, Any]:
    split = dict.fromkeys(PARTS, 0.0) | {"memory floor": floor_s, "above the floor": seconds - floor_s}
    by_account = {"queueing": wait_ms, "prefill": 0.0, "in no account": 1.0}
    base = {"case": "c", "seconds": seconds, "predicted_s": None, "unpredicted": "launches", "out_tok_s": 1234.0}
    base |= {"first_step_ms": 9.0, "decode_step_ms": seconds, "steps": round(10 * seconds), "held_slots": 0}
    return base | {"parts_s": split, "accounts_ms": by_account, "request_ms": wait_ms + 1.0} | more


def test_a_change_is_split_into_parts_and_accounts_that_sum_to_it() -> None:
    arms = {"old": [row(4.0, 1.0, 30.0, held_slots=7)], "new": [row(1.0, 0.5, 10.0)]}
    (found,) = changes(arms)
    assert (found["from"], found["to"], found["seconds"], found["steps"], found["held_slots"]) == (
        "old",
        "new",
        -3.0,
        -30,
        -7,
    )
    assert sum(found["parts_s"].values()) == pytest.approx(found["seconds"])
    assert sum(found["accounts_ms"].values()) == pytest.approx(found["request_ms"]) == pytest.approx(-20.0)
    assert found["step_ratio"] == 0.25 and found["parts_s"]["memory floor"] == -0.5
    text = "\n".join(changes_tables([found | {"expected_ratio": 0.3}]))
    assert "| 0.25 | 0.3 |" in text and "queueing" in text and "prefill" not in text
    assert changes_tables([]) == changes({}) == []


def test_the_table_says_what_was_predicted_or_why_not_and_which_arm_failed() -> None:
    arms = {"a": [row(4.0, 1.0, 30.0)], "b": [row(1.0, 0.5, 10.0, predicted_s=0.95)], "c": {"failed": "no memory"}}
    lines = arms_table(arms)
    assert "| 4.00 | no: launches |" in lines[2] and "| 1.00 | 0.95 |" in lines[3]
    assert lines[4] == "| | c | failed |" and lines[1].count("---") == lines[0].count("|") - 1
