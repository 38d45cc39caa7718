"""Arms of an ablation without HTTP: what bounds an arm's wall time, what plan expected of it, what a change moved.

    compute floor, memory floor   the shortest time of a step's parts at the device's peaks, by what bounds each part
    above the floor               the rest of the step on the device; a step without graphs waits for launches there
    gaps                          the device idle between two steps
    residual                      of the wall time, in none of them

A row is what one arm did of one case, as plain values. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from steelyard.plan.calibration import Calibration
from steelyard.plan.records import StepRecord
from steelyard.plan.roofline import Roofline

Json = dict[str, Any]
PARTS = ("compute floor", "memory floor", "above the floor", "gaps", "residual")
_LEFT_OUT = (
    ("attention_backend", ("naive", "sdpa"), "gathered attention"),
    ("enforce_eager", (True,), "launches"),
    ("device", ("cpu",), "no such device"),
)
"""Setting, values, and what plan has no term for under them."""


def phases(steps: Sequence[Json]) -> Json:
    """Prefill and decode apart, in ms: the first step, and the middle one of the later half, each with its gap.

    Without a KV cache every step has prefill tokens; what begins a request is told from what continues it by order.
    """
    spans = [(s["device_ns"] + s["gap_ns"]) / 1e6 for s in steps]
    later = sorted(spans[len(spans) // 2 :])
    return {"first_step_ms": spans[0], "decode_step_ms": later[len(later) // 2]}


def parts(steps: Sequence[Json], roofline: Roofline | None, seconds: float) -> dict[str, float]:
    """Seconds of each of PARTS; they sum to `seconds`. Without a roofline no floor is known."""
    found = dict.fromkeys(PARTS, 0.0)
    for i, step in enumerate(steps):
        device_s = step["device_ns"] / 1e9
        found["gaps"] += step["gap_ns"] / 1e9 if i else 0.0
        found["above the floor"] += device_s
        if roofline is None:
            continue
        floor = roofline.step(StepRecord.from_json(step).chunks, routing="fewest")
        share = min(device_s / floor.seconds, 1.0)  # a step under its floor counts as all floor
        for part in floor.parts:
            name = "compute floor" if part.bound == "compute" else "memory floor"
            found[name] += share * part.seconds
            found["above the floor"] -= share * part.seconds
    found["residual"] = seconds - sum(found.values())
    return found


def predicted_s(steps: Sequence[Json], roofline: Roofline, calibration: Calibration) -> float:
    """The calibrated model's time of steps with these contents; how long they took is not looked at."""
    return sum(calibration.estimate(roofline, StepRecord.from_json(step).chunks).seconds for step in steps)


def why_unpredicted(config: Mapping[str, Any]) -> str:
    """What the plan has no term for under these settings; "" where it predicts."""
    return next((why for name, values, why in _LEFT_OUT if config.get(name) in values), "")


def changes(arms: Mapping[str, Sequence[Json]]) -> list[Json]:
    """Of each case, each arm against the one before it that ran: differences, and steps and their ratio.

    `parts_s` and `accounts_ms` (of a request) sum to the differences of wall time and of a request's mean time.
    """
    found = []
    names = list(arms)
    for number, case in enumerate(row["case"] for row in next(iter(arms.values()), ())):
        for before, after in pairwise(names):
            a, b = arms[before][number], arms[after][number]
            row = {"case": case, "from": before, "to": after, "step_ratio": b["decode_step_ms"] / a["decode_step_ms"]}
            for key in ("seconds", "steps", "held_slots", "request_ms"):
                row[key] = b[key] - a[key]
            for key in ("parts_s", "accounts_ms"):
                row[key] = {name: b[key][name] - a[key][name] for name in b[key]}
            found.append(row)
    return found


def arms_table(arms: Mapping[str, Any]) -> list[str]:
    """An arm and case a row; an arm that failed says so."""
    heads = ["s", "predicted s", "out tok/s", "first step, ms", "decode step, ms", "steps", "held slots", *PARTS]
    lines = [f"| case | arm | {' | '.join(heads)} |", "|" + " --- |" * (2 + len(heads))]
    for arm, rows in arms.items():
        if isinstance(rows, dict):
            lines.append(f"| | {arm} | failed |")
            continue
        for r in rows:
            predicted = f"{r['predicted_s']:.2f}" if r["predicted_s"] is not None else f"no: {r['unpredicted']}"
            cells = [f"{r['seconds']:.2f}", predicted, f"{r['out_tok_s']:,.0f}", f"{r['first_step_ms']:.2f}"]
            cells += [f"{r['decode_step_ms']:.2f}", str(r["steps"]), str(r["held_slots"])]
            cells += [f"{r['parts_s'][name]:.2f}" for name in PARTS]
            lines.append(f"| {r['case']} | {arm} | {' | '.join(cells)} |")
    return lines


def changes_tables(found: Sequence[Json]) -> list[str]:
    """What each change moved: seconds by what bounds them, then milliseconds of a mean request by account."""
    if not found:
        return []
    accounts = [name for name in found[0]["accounts_ms"] if any(abs(row["accounts_ms"][name]) > 0 for row in found)]
    heads = ["s", *PARTS, "steps", "held slots", "decode step, B / A", "plan's"]
    lines = [f"| case | from | to | {' | '.join(heads)} |", "|" + " --- |" * (3 + len(heads))]
    for row in found:
        cells = [f"{row['seconds']:+.2f}", *(f"{row['parts_s'][name]:+.2f}" for name in PARTS)]
        expected = row.get("expected_ratio")
        cells += [f"{row['steps']:+d}", f"{row['held_slots']:+d}", f"{row['step_ratio']:.3g}"]
        cells.append("" if expected is None else f"{expected:.3g}")
        lines.append(f"| {row['case']} | {row['from']} | {row['to']} | {' | '.join(cells)} |")
    lines += ["", "Milliseconds of a mean request, from submission to its end, by account:", ""]
    lines += [f"| case | from | to | all | {' | '.join(accounts)} |", "|" + " --- |" * (4 + len(accounts))]
    for row in found:
        cells = [f"{row['request_ms']:+,.1f}", *(f"{row['accounts_ms'][name]:+,.1f}" for name in accounts)]
        lines.append(f"| {row['case']} | {row['from']} | {row['to']} | {' | '.join(cells)} |")
    return lines
