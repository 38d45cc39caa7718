"""The calibrated model against steps of this server on an H200: fitted on two workloads, it predicts the others.

The steps are those of benchmarks/results: two models, seven workloads each. Only single and short-short are shown to
the fit. A step time is held by its median error, a workload by its whole time and its throughput; the throughput of
whole runs is also predicted from nothing but the requests' lengths, and held against what the run reported.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from steelyard.perf.workloads import case_names, find_case
from steelyard.plan import fit as fitting
from steelyard.plan.calibration import Calibration, generic
from steelyard.plan.costs import Chunk
from steelyard.plan.fit import evaluate, fit
from steelyard.plan.records import StepRecord, read_records
from steelyard.plan.roofline import Roofline
from tests.plan.setups import make_roofline

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MODELS = {"llama3-8b": "llama-3-8b", "qwen3-0.6b": "qwen3-0.6b"}
SHOWN = ("single", "short-short")
HIDDEN = ("long-short", "short-long", "long-long", "mixed")
WITHIN = 0.10


@cache
def kept() -> tuple[StepRecord, ...]:
    """Steps of workloads; the points of the batch curve are left out."""
    return tuple(r for r in read_records(RESULTS / "h200-steps.jsonl") if " batch " not in r.workload)


def of_model(model: str, kinds: tuple[str, ...]) -> list[StepRecord]:
    return [r for r in kept() if r.workload.split()[0] == model and r.workload.split()[1] in kinds]


@cache
def fitted(model: str) -> tuple[Roofline, Calibration]:
    roofline = make_roofline(MODELS[model], "H200")
    return roofline, fit(roofline, of_model(model, SHOWN))


def test_every_kept_step_is_looked_at_and_none_is_under_the_floor() -> None:
    seen = under = 0
    for model in MODELS:
        roofline, calibration = fitted(model)
        errors = evaluate(roofline, calibration, of_model(model, SHOWN + HIDDEN))
        assert len(errors) == 7
        seen += sum(e.num_steps for e in errors.values())
        under += sum(e.under_floor for e in errors.values())
    assert seen == len(kept()) == 4136
    assert under == 0


@pytest.mark.parametrize("model", MODELS)
def test_steps_and_throughput_of_workloads_it_has_not_seen_are_within_ten_percent(model: str) -> None:
    roofline, calibration = fitted(model)
    errors = evaluate(roofline, calibration, of_model(model, HIDDEN))
    assert {name.split()[1] for name in errors} == set(HIDDEN)
    for name, e in errors.items():
        assert e.median_abs <= WITHIN, name
        assert abs(e.total) <= WITHIN, name
        assert abs(e.throughput) <= WITHIN, name


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("model", MODELS)
def test_decode_steps_of_any_number_of_rows_are_within_ten_percent(model: str, rows: int) -> None:
    """The batch curve, whose few rows no workload has: those of the small model go through tiles."""
    roofline, calibration = fitted(model)
    points = [r for r in read_records(RESULTS / "h200-steps.jsonl") if r.workload == f"{model} batch {rows}"]
    full = [r for r in points if sum(c.count for c in r.chunks) == rows and all(c.num_new == 1 for c in r.chunks)]
    assert len(full) >= 5
    assert abs(evaluate(roofline, calibration, full)[f"{model} batch {rows}"].total) <= WITHIN


@pytest.mark.parametrize("model", MODELS)
def test_the_workloads_it_was_fitted_on_are_within_ten_percent(model: str) -> None:
    roofline, calibration = fitted(model)
    errors = evaluate(roofline, calibration, of_model(model, SHOWN))
    assert len(errors) == 3
    for name, e in errors.items():
        assert e.median_abs <= WITHIN and abs(e.total) <= WITHIN, name


@pytest.mark.parametrize("model", MODELS)
def test_coefficients_are_what_kernels_can_do(model: str) -> None:
    """No coefficient stands in for another: each is between the peak and a third of it."""
    _, calibration = fitted(model)
    assert all(1.0 <= c <= 3.0 for c in calibration.coefficients[2:])
    assert 1e-4 < calibration.step_s < 5e-3
    assert calibration.lone < 0.6  # products with one row run as other kernels


@pytest.mark.parametrize("model", MODELS)
def test_without_a_fit_the_generic_model_is_within_fifteen_percent(model: str) -> None:
    roofline, _ = fitted(model)
    for name, e in evaluate(roofline, generic(roofline), of_model(model, SHOWN + HIDDEN)).items():
        assert abs(e.total) <= 0.15, name


def offline_steps(lens: tuple[tuple[int, int], ...], budget: int = 8192) -> list[tuple[Chunk, ...]]:
    """Steps of a batch of (prompt, output) requests submitted at once: decodes first, then prompts in order."""
    waiting = [[prompt, 0, output] for prompt, output in lens]
    running: list[list[int]] = []  # [context, tokens still to come]
    steps = []
    while waiting or running:
        chunks = [Chunk(1, context + 1, n) for context, n in sorted(Counter(c for c, _ in running).items())]
        room = budget - len(running)
        running = [[context + 1, left - 1] for context, left in running if left > 1]
        while waiting and room > 0:
            prompt, done, output = waiting[0]
            new = min(prompt - done, room)
            room -= new
            ends = done + new == prompt
            chunks.append(Chunk(new, done + new, 1, int(ends)))
            if not ends:
                waiting[0][1] += new
                break
            waiting.pop(0)
            if output > 1:
                running.append([prompt, output - 1])
        steps.append(tuple(chunks))
    return steps


def test_replayed_steps_make_every_token() -> None:
    lens = ((5, 3), (20, 1), (7, 9))
    steps = offline_steps(lens, budget=8)
    assert sum(c.num_sampled * c.count for s in steps for c in s) == 13
    assert sum(c.num_new * c.count for s in steps for c in s) == 32 + 13 - 3
    assert max(sum(c.num_new * c.count for c in s) for s in steps) == 8


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", case_names("offline"))
def test_throughput_of_a_whole_run_follows_from_its_lengths(model: str, name: str) -> None:
    """Wall time of the run, host and all, from prompt and output lengths and the fit: nothing of the run is shown."""
    rows = json.loads((RESULTS / "h200.json").read_text())
    (row,) = [r for r in rows if (r.get("model"), r.get("case")) == (model, name)]
    roofline, calibration = fitted(model)
    case = find_case(name)
    steps = offline_steps(case.lens)
    assert len(steps) == row["steps"]
    seconds = sum(calibration.estimate(roofline, s).seconds for s in steps)
    assert case.output_tokens / seconds == pytest.approx(row["out_tok_s"], rel=WITHIN)


@pytest.mark.parametrize("name", ["GROUP_ERROR", "OWN_ERROR", "PRIOR_WIDTH"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("model", MODELS)
def test_the_prediction_does_not_hang_on_the_widths_of_the_fit(
    model: str, factor: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = getattr(fitting, name)
    monkeypatch.setattr(fitting, name, tuple(factor * v for v in value) if name == "PRIOR_WIDTH" else factor * value)
    roofline = make_roofline(MODELS[model], "H200")
    found = fit(roofline, of_model(model, SHOWN))
    assert found != fitted(model)[1]
    for workload, e in evaluate(roofline, found, of_model(model, HIDDEN)).items():
        assert abs(e.total) <= WITHIN and e.median_abs <= WITHIN, workload
