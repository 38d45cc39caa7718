"""Tenants are charged what the step ledger says, less what was computed again; predictions come from its rates."""

from __future__ import annotations

import numpy as np

from steelyard.core.step import StepTiming
from steelyard.ledger.book import Stay, StepBook, StepEntry
from steelyard.ledger.charges import LearnedCost, tenant_charges
from steelyard.ledger.rates import Load, Rates
from steelyard.ledger.step import participants


def test_a_tenants_charge_is_its_rows_shares_without_what_was_computed_again() -> None:
    rows = participants(
        {
            "owners": [1, 2, 3, 4],
            "starts": [0, 0, 50, 9],
            "num_new": [10, 20, 1, 8],
            "is_decode": [0, 0, 1, 0],
            "num_again": [0, 15, 0, 8],
            "sampled": [1, 1, 1, 0],
        }
    )
    shares = np.array([100, 200, 30, 80])
    timing = StepTiming(0, 500, 500)
    entry = StepEntry(1, rows, Load(39, 51, 0, 3), Rates(), 0, 500, 500, {}, shares, 90, timing)
    stays = {i: Stay(str(i), 0, tenant, i, 10, 0) for i, tenant in ((1, "a"), (2, "b"), (3, "a"), (4, "c"))}
    assert tenant_charges(entry, stays) == {"a": (130, 11), "b": (50, 5), "c": (0, 0)}


class Known(StepBook):
    rates = Rates(0.0, 1000.0, 10.0, 0.5, 0.25, 3.0, "made up", True)  # type: ignore[assignment]


def test_predictions_are_the_rates_and_nothing_before_there_are_any() -> None:
    cost = LearnedCost(Known(4, 0), max_tokens=100)
    assert cost.step_ns(50, 4, 200) == 1000 + 500 + 100 + 12
    assert cost.recompute_ns(150) == 2 * 1000 + 1500 + round(0.25 * 150 * 151 / 2)
    unknown = LearnedCost(StepBook(4, 0), max_tokens=100)
    assert (unknown.step_ns(50, 4, 200), unknown.recompute_ns(150)) == (0, 0)
