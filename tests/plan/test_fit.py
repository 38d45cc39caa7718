"""The calibrated model recovers what made the data, predicts what it has not seen, and says when it cannot."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import StartError
from steelyard.plan.calibration import Calibration, generic
from steelyard.plan.costs import Chunk, Setup, decode, prefill
from steelyard.plan.device import Ceilings
from steelyard.plan.fit import LEAST_EFFICIENCY, evaluate, fit, solve_linear
from steelyard.plan.records import StepRecord
from steelyard.plan.roofline import Rates, Roofline
from tests.plan.setups import make_roofline

ROOF = make_roofline()
TRUE = Calibration(Rates.datasheet(ROOF.setup.device), 4e-4, 0.6, 1.5, 1.25, 1.15, 1.7, "the truth")


def single(prompt: int, count: int) -> list[tuple[Chunk, ...]]:
    return [prefill(prompt)] + [decode(1, prompt + i) for i in range(1, count)]


def batch(prompt: int, output: int, size: int) -> list[tuple[Chunk, ...]]:
    """Prompts in chunks of 2,048 tokens mixed with growing decodes, then decodes alone."""
    steps: list[tuple[Chunk, ...]] = []
    per_step = max(2048 // prompt, 1)
    pieces = max(prompt // 2048, 1)
    running = 0
    while running < size:
        for piece in range(1, pieces + 1):
            new = Chunk(prompt // pieces, prompt * piece // pieces, per_step, int(piece == pieces))
            steps.append((Chunk(1, prompt + 3, running), new) if running else (new,))
        running += per_step
    return steps + [decode(running, prompt + i) for i in range(3, output)]


def records(steps: list[tuple[Chunk, ...]], workload: str, noise: float = 0.0, seed: int = 1) -> list[StepRecord]:
    rng = random.Random(seed)
    times = [TRUE.estimate(ROOF, s).seconds * (1 + rng.uniform(-noise, noise)) for s in steps]
    return [StepRecord(s, t, workload) for s, t in zip(steps, times)]


def write_records(path: Path, steps: list[tuple[Chunk, ...]], workload: str) -> None:
    """A JSONL file of step records as an engine keeps them."""
    rows = [
        {
            "workload": workload,
            "device_ns": round(TRUE.estimate(ROOF, s).seconds * 1e9),
            "chunks": [[c.num_new, c.context_len, c.count, c.num_sampled] for c in s],
        }
        for s in steps
    ]
    path.write_text("\n".join(json.dumps(r) for r in rows))


def test_the_coefficients_that_made_the_data_are_found_again() -> None:
    kept = records(single(128, 64) + single(4096, 64) + batch(256, 128, 128), "all")
    found = fit(ROOF, kept)
    assert found.coefficients[2:] == pytest.approx(TRUE.coefficients[2:], rel=0.1)
    assert found.step_s == pytest.approx(TRUE.step_s, rel=0.1)
    for step in (decode(64, 4096), prefill(4096), decode(1, 4096), (*decode(200, 100), *prefill(512))):
        assert found.estimate(ROOF, step).seconds == pytest.approx(TRUE.estimate(ROOF, step).seconds, rel=0.01)


def test_a_thousand_equal_steps_count_as_one_observation() -> None:
    """The data disagree with themselves: lone steps are 12 % slower, and there may be any number of them."""
    others = records(batch(256, 128, 128), "short-short")
    slow = [StepRecord(r.chunks, r.device_s * 1.12) for r in records(single(128, 64), "single")]
    few, many = fit(ROOF, slow[:8] + others), fit(ROOF, slow * 20 + others)
    for step in (decode(128, 300), prefill(2048)):
        assert many.estimate(ROOF, step).seconds == pytest.approx(few.estimate(ROOF, step).seconds, rel=0.01)


def test_a_dip_of_some_row_counts_does_not_pass_for_the_price_of_kv() -> None:
    """Products are 25 % slower at every second number of rows, as where tiles do not fit, and contexts are short."""
    steps = single(128, 64) + batch(256, 256, 128) + [decode(b, 320) for b in range(8, 128, 4)]
    kept = [
        StepRecord(r.chunks, r.device_s * (1.25 if i % 2 and len(r.chunks) == 1 and r.chunks[0].count > 1 else 1.0))
        for i, r in enumerate(records(steps, "short"))
    ]
    found = fit(ROOF, kept)
    assert found.kv == pytest.approx(TRUE.kv, rel=0.15)
    far = decode(128, 4096)
    assert found.estimate(ROOF, far).seconds == pytest.approx(TRUE.estimate(ROOF, far).seconds, rel=0.15)


def test_an_outlier_is_not_followed() -> None:
    kept = records(single(128, 64) + batch(256, 128, 128), "all")
    spoiled = [StepRecord(r.chunks, r.device_s * (10.0 if i == 100 else 1.0)) for i, r in enumerate(kept)]
    assert fit(ROOF, spoiled).coefficients == pytest.approx(fit(ROOF, kept).coefficients, rel=0.02)


def test_fitted_on_single_and_short_short_it_predicts_the_others_within_ten_percent() -> None:
    shown = records(single(128, 257) + single(4096, 257), "single", 0.05)
    shown += records(batch(256, 128, 256), "short-short", 0.05, seed=2)
    hidden = records(batch(4096, 128, 64), "long-short", 0.05, seed=3)
    hidden += records(batch(256, 1024, 256), "short-long", 0.05, seed=4)
    hidden += records(batch(4096, 1024, 64), "long-long", 0.05, seed=5)
    found = evaluate(ROOF, fit(ROOF, shown), hidden)
    assert set(found) == {"long-short", "short-long", "long-long"}
    for errors in found.values():
        assert errors.mean_abs < 0.1
        assert abs(errors.total) < 0.08
        assert errors.under_floor == 0
        assert errors.mean_abs > 0.005  # the noise is still seen


def test_steps_under_the_floor_are_counted() -> None:
    step = decode(32, 1024)
    floor_s = ROOF.floor(step).seconds
    rows = [StepRecord(step, floor_s * f, "w") for f in (0.5, 0.99, 1.0, 1.3)]
    assert evaluate(ROOF, TRUE, rows)["w"].under_floor == 2


def test_a_term_that_never_occurs_keeps_its_generic_coefficient() -> None:
    kept = records([decode(b, c) for b in (1, 16, 64, 200) for c in (128, 1000, 4000)], "decode")
    found = fit(ROOF, kept)
    assert found.attention == pytest.approx(generic(ROOF).attention)
    assert found.kv == pytest.approx(TRUE.kv, rel=0.05)


def test_what_records_cannot_tell_apart_stays_near_the_ceilings() -> None:
    """One kind of step cannot say what is KV and what are weights: each keeps the measured machine's share."""
    device = ROOF.setup.device.with_ceilings(Ceilings(7e14, 5.3e14, 3.4e12, 4.1e12, 4.2e12, 3e-4))
    measured = Roofline(Setup(ROOF.setup.shape, device, ROOF.setup.weights))
    kept = [StepRecord(decode(64, 2048), measured.reach(decode(64, 2048)).seconds * 1.3)] * 10
    found = fit(measured, kept)
    assert found.rates == Rates.measured(device)
    assert all(1.0 <= c < 1.5 for c in found.coefficients[2:])
    assert found.estimate(measured, decode(64, 2048)).seconds == pytest.approx(kept[0].device_s, rel=0.02)


def test_data_that_cannot_tell_terms_apart_still_fits_itself() -> None:
    kept = records([decode(1, 100)] * 10, "one")
    assert fit(ROOF, kept).estimate(ROOF, decode(1, 100)).seconds == pytest.approx(kept[0].device_s, rel=0.02)


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_efficiencies_are_those_of_a_machine_whatever_the_data(seed: int) -> None:
    rng = random.Random(seed)
    steps = [decode(rng.randint(1, 64), rng.randint(1, 4096)) for _ in range(12)]
    steps += [prefill(rng.randint(2, 4096)) for _ in range(3)]
    found = fit(ROOF, [StepRecord(s, rng.uniform(1e-5, 1e-1)) for s in steps])
    assert all(1.0 - 1e-9 <= c <= 1.0 / LEAST_EFFICIENCY + 1e-9 for c in found.coefficients[2:])
    assert 0.0 < found.lone <= 1.0 and 0.0 < found.step_s <= 1.0
    for step in steps:
        assert found.estimate(ROOF, step).seconds > ROOF.floor(step).seconds


@given(st.integers(0, 2**32), st.integers(1, 6))
@settings(max_examples=30)
def test_linear_systems_are_solved(seed: int, size: int) -> None:
    rng = random.Random(seed)
    half = [[rng.uniform(-1, 1) for _ in range(size)] for _ in range(size)]
    matrix = [[sum(half[k][i] * half[k][j] for k in range(size)) + (i == j) for j in range(size)] for i in range(size)]
    wanted = [rng.uniform(-10, 10) for _ in range(size)]
    vector = [sum(a * x for a, x in zip(row, wanted)) for row in matrix]
    assert solve_linear(matrix, vector) == pytest.approx(wanted)


def test_too_few_records_are_refused() -> None:
    with pytest.raises(StartError, match="at least 8"):
        fit(ROOF, records(single(128, 7), "few"))
