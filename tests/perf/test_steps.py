"""Step records say what a step did, and the planner reads them as they are."""

from __future__ import annotations

import json
from pathlib import Path

from steelyard.core.step import RowWork, StepPlan, StepTiming, Want
from steelyard.perf.steps import append_jsonl, record, thin
from steelyard.plan.records import StepRecord, read_records

PLAN = StepPlan(
    7,
    work=(
        RowWork(0, 99, 1, Want.TOKEN),
        RowWork(1, 9, 1, Want.TOKEN),
        RowWork(2, 64, 32, Want.TOKEN),
        RowWork(3, 0, 16, Want.NOTHING),
    ),
)
TIMING = StepTiming(1, 2, 5000, 70, "cpu_late", "mixed 64", 14, 0)


def test_a_record_has_the_sums_the_planner_fits() -> None:
    row = record(PLAN, TIMING)
    assert (row["decode_rows"], row["context_sum"]) == (2, 110)
    assert (row["prefill_tokens"], row["prefill_rows"], row["prefill_context_sum"]) == (48, 2, 112)
    assert row["prefill_sampled"] == 1 and row["graph"] == "mixed 64" and row["gap_ns"] == 70
    found = StepRecord.from_json(json.loads(json.dumps(row)))
    assert found.device_s == 5e-6 and sum(c.num_new * c.count for c in found.chunks) == 50


def test_thinning_keeps_prefills_and_spreads_decodes(tmp_path: Path) -> None:
    decode = {"workload": "d", **record(StepPlan(1, work=PLAN.work[:1]), TIMING)}
    rows = [
        {"workload": "p", **record(PLAN, TIMING)} if i % 50 == 0 else decode | {"device_ns": i} for i in range(1000)
    ]
    kept = thin(rows, 100)
    assert len(kept) <= 100 and sum(r["workload"] == "p" for r in kept) == 20
    times = [r["device_ns"] for r in kept if r["workload"] == "d"]
    assert times == sorted(times) and times[-1] > 900 and thin(rows, 2000) == rows
    path = tmp_path / "steps.jsonl"
    append_jsonl(path, kept[:3])
    append_jsonl(path, kept[3:])
    assert len(read_records(path)) == len(kept)
