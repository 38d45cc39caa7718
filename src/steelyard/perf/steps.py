"""Step records: what each step computed and how long the device took, one JSON object a line.

A proxy in front of a runner takes the sums of each plan and keeps its timing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from steelyard.core.step import MemoryTerms, Runner, RunnerCaps, Step, StepPlan, StepResult, StepTiming, Want


class RecordingRunner:
    """Implements core.step.Runner over another one. `steps`: a record of each step collected, without a workload.

    Sums are taken while the device runs the next step; plans are not kept, since what is kept makes every collection
    of garbage longer.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plans: list[StepPlan] = []
        self.steps: list[dict[str, Any]] = []

    @property
    def caps(self) -> RunnerCaps:
        return self._runner.caps

    def launch(self, plan: StepPlan) -> Step:
        self._plans.append(plan)
        return self._runner.launch(plan)

    def sample(self, step: Step, masks: dict[int, Any]) -> None:
        self._runner.sample(step, masks)

    def collect(self, step: Step) -> StepResult:
        result = self._runner.collect(step)
        self.steps.append(record(self._plans.pop(0), result.timing))
        return result

    def memory(self) -> MemoryTerms:
        return self._runner.memory()

    def named(self, workload: str) -> list[dict[str, Any]]:
        """The records of the last run under a workload's name."""
        return [{"workload": workload, **row} for row in self.steps]


def record(plan: StepPlan, timing: StepTiming) -> dict[str, Any]:
    """One step as plain values; sums as plan/records.py reads them. A row with one new token is a decode."""
    row: dict[str, Any] = {
        "decode_rows": 0,
        "context_sum": 0,
        "graph": timing.graph,
        "device_ns": timing.device_ns,
        "gap_ns": timing.gap_ns,
        "gap_cause": timing.gap_cause,
        "padded_tokens": timing.padded_tokens,
        "padded_rows": timing.padded_rows,
    }
    starts = [w.start for w in plan.work if w.num_new == 1]
    row["decode_rows"], row["context_sum"] = len(starts), sum(starts) + len(starts)
    if len(starts) < len(plan.work):
        prefills = [w for w in plan.work if w.num_new > 1]
        row["prefill_tokens"] = sum(w.num_new for w in prefills)
        row["prefill_rows"] = len(prefills)
        row["prefill_context_sum"] = sum(w.start + w.num_new for w in prefills)
        row["prefill_sampled"] = sum(Want.TOKEN in w.want for w in prefills)
    return row


def thin(rows: Sequence[dict[str, Any]], at_most: int) -> list[dict[str, Any]]:
    """All steps with a prefill first, then decodes evenly spread, in order; at most so many."""
    if len(rows) <= at_most:
        return list(rows)
    prefills = [i for i, row in enumerate(rows) if "prefill_tokens" in row]
    decodes = [i for i, row in enumerate(rows) if "prefill_tokens" not in row]
    room = max(at_most - min(len(prefills), at_most // 2), 1)
    kept = _spread(prefills, at_most - min(room, len(decodes))) + _spread(decodes, room)
    return [rows[i] for i in sorted(kept)]


def _spread(items: list[int], count: int) -> list[int]:
    if len(items) <= count:
        return items
    return [items[i * len(items) // count] for i in range(count)]


def append_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a JSON Lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
