"""A step's shares sum to it, its causes sum to it, and rates come back from steps that were made of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from steelyard.ledger.rates import MIN_STEPS, Fitter, Load, Rates, fit
from steelyard.ledger.step import causes, participants, shares, tokens_by_kind

ROWS = participants(
    {
        "owners": [1, 2, 3, 4],
        "starts": [100, 7, 0, 32],
        "num_new": [1, 1, 64, 16],
        "is_decode": [1, 1, 0, 0],
        "num_again": [0, 0, 0, 10],
        "sampled": [1, 1, 0, 1],
    }
)
RATES = Rates(100.0, 500.0, 10.0, 2.0, 0.5, 30.0, "made up", True)
PAIRS = [101, 8, 64 * 65 // 2, 16 * 32 + 16 * 17 // 2]


def test_pairs_are_counted_as_the_mask_allows_them() -> None:
    loop = [sum(p + 1 for p in range(s, s + n)) for s, n in zip([100, 7, 0, 32], [1, 1, 64, 16])]
    assert ROWS.pairs.tolist() == loop == PAIRS


@pytest.mark.parametrize("device_ns", [0, 1, 999, 2_000, 10_000, 123_457])
@pytest.mark.parametrize("rates", [Rates(), RATES])
@pytest.mark.parametrize("padded", [0, 50])
def test_shares_and_engine_sum_to_the_step(device_ns: int, rates: Rates, padded: int) -> None:
    each, engine_ns, load = shares(device_ns, ROWS, rates, padded)
    assert int(each.sum()) + engine_ns == device_ns
    assert engine_ns >= 0 and each.min() >= 0
    assert load == Load(82, 109, PAIRS[2] + PAIRS[3], 3)


def test_a_step_as_long_as_expected_charges_each_what_it_is_expected_to_cost() -> None:
    expected = RATES.requests_ns(ROWS.load())
    each, engine_ns, _ = shares(round(expected + 100 + 10 * 50), ROWS, RATES, 50)
    assert engine_ns == 100 + 500
    by_hand = [
        (500 / 82 + 10) * n + (2.0 if d else 0.5) * p + 30 * s
        for n, d, p, s in zip([1, 1, 64, 16], [1, 1, 0, 0], PAIRS, [1, 1, 0, 1])
    ]
    assert all(abs(a - b) <= 1 for a, b in zip(each.tolist(), by_hand))


def test_what_is_over_the_model_is_the_engines_and_what_is_under_shrinks_all() -> None:
    expected = round(RATES.requests_ns(ROWS.load()))
    each, engine_ns, _ = shares(expected + 100 + 7_000, ROWS, RATES)
    assert engine_ns == pytest.approx(7_100, abs=1)
    half, engine_half_ns, _ = shares((expected + 100) // 2, ROWS, RATES)
    assert engine_half_ns == pytest.approx(50, abs=2)
    assert np.abs(half * 2 - each).max() <= 3


@pytest.mark.parametrize("index", range(4))
def test_causes_sum_to_the_step_and_say_who_was_in_the_way(index: int) -> None:
    found = causes(50_000, ROWS, index, RATES, 5)
    parts = found.as_dict()
    assert sum(parts[name] for name in parts if name.endswith("_ns")) == 50_000
    assert found.others_prefill_tokens == 80 - (0 if index < 2 else [64, 16][index - 2])
    assert found.others_decode_rows == 2 - (index < 2)
    alone = causes(50_000, ROWS, 0, RATES)
    assert alone.own_ns == (500 + 10 + 2 * 101 + 30)
    assert alone.others_decode_ns == (10 + 2 * 8 + 30)
    assert alone.others_prefill_ns == round(10 * 80 + 0.5 * (PAIRS[2] + PAIRS[3]) + 30)


def test_kinds_of_tokens_sum_to_all() -> None:
    assert tokens_by_kind(ROWS) == {"prefill": 70, "recompute": 10, "decode": 2}


def steps(rates: Rates, count: int, noise: float = 0.0) -> np.ndarray:
    rng = random.Random(5)
    made = []
    for _ in range(count):
        load = Load(rng.randint(1, 900), rng.randint(0, 90_000), rng.choice([0, rng.randint(0, 400_000)]), 40)
        ns = rates.requests_ns(load) * (1 + noise * rng.uniform(-1, 1))
        made.append((ns, load.num_tokens, load.decode_context, load.prefill_pairs, load.num_sampled))
    return np.array(made)


def test_rates_come_back_from_steps_made_of_them() -> None:
    true = Rates(0.0, 9_000.0, 12.0, 0.4, 0.03, 0.0)
    found = fit(steps(true, 300))
    assert found.token_ns == pytest.approx(12.0, rel=1e-6)
    assert found.context_ns == pytest.approx(0.4, rel=1e-6)
    assert found.pair_ns == pytest.approx(0.03, rel=1e-6)
    assert found.products_ns + 40 * found.row_ns == pytest.approx(9_000.0, rel=1e-6)
    noisy = fit(steps(true, 500, noise=0.2))
    assert noisy.token_ns == pytest.approx(12.0, rel=0.15)


def test_no_rate_is_negative_whatever_the_steps() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        found = fit(rng.integers(1, 1000, (64, 5)).astype(float))
        assert min(found.products_ns, found.token_ns, found.context_ns, found.pair_ns, found.row_ns) >= 0


def test_the_fitter_knows_nothing_until_it_has_seen_enough() -> None:
    fitter = Fitter()
    for i in range(MIN_STEPS):
        assert not fitter.rates.is_known
        fitter.add(Load(i + 1, 0, 0, 1), 1000 + 10 * i)
    assert fitter.rates.is_known
    assert fitter.rates.token_ns == pytest.approx(10.0, rel=0.05)
