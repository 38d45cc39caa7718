"""Repeats, pairs, and the search for capacity against servers whose capacity is known."""

from __future__ import annotations

import asyncio
import random

import pytest

from steelyard.bench.ablate_text import relative
from steelyard.bench.repeats import Change, paired, repeats
from steelyard.bench.stats import mean_interval
from steelyard.bench.sweep import Point, rates_between, search_capacity
from steelyard.errors import InvalidRequest


def test_b09_runs_far_apart_are_not_one_number() -> None:
    good, noisy = repeats([100.0, 101.0, 99.0]), repeats([100.0, 101.0, 60.0])
    assert good.stable and good.median == 100.0 and good.spread == 2.0
    assert not noisy.stable and "NOT STABLE" in noisy.verdict and "60" in noisy.verdict
    assert not repeats([100.0, 100.0]).stable, "two runs cannot be called stable"


def test_pairs_see_through_a_drift_that_hides_the_difference() -> None:
    drift = [100.0, 130.0, 90.0, 150.0]
    a, b = drift, [x + 5 + e for x, e in zip(drift, (0.1, -0.1, 0.2, -0.2))]
    found = paired(a, b)
    assert found.decided and found.relative.mean == pytest.approx(0.0440, abs=1e-3)
    assert not repeats(a).stable
    assert not paired([1.0, 2.0, 3.0], [2.0, 1.0, 3.0]).decided


def test_no_interval_of_a_relative_difference_lies_below_minus_100_percent() -> None:
    """A fall to a few percent, as of time to first token with a cache, in runs that scatter widely."""
    a, b = [1000.0, 400.0, 2500.0], [20.0, 90.0, 10.0]
    found, back = paired(a, b).relative, paired(b, a).relative
    assert found.low is not None and found.high is not None and back.low is not None
    assert -1.0 < found.low < found.mean < found.high
    assert mean_interval([(y - x) / x for x, y in zip(a, b)]).low < -1.0, "the case is one where a difference's would"
    assert (1 + back.low) * (1 + found.high) == pytest.approx(1.0), "B over A is the inverse of A over B"
    wild = paired([1.0, 1e-300, 1.0], [1.0, 1e300, 1.0]).relative.low
    assert wild is not None and wild >= -1.0
    assert relative(paired(b, b)) == "+0.0% (+0.0% to +0.0%)"


@pytest.mark.parametrize("num_pairs", [1, 2])
def test_fewer_than_three_pairs_have_no_interval_and_decide_nothing(num_pairs: int) -> None:
    found = paired([100.0, 101.0][:num_pairs], [200.0, 202.0][:num_pairs])
    assert found.relative == Change(pytest.approx(1.0), None, None, num_pairs) and not found.decided
    assert relative(found) == "+100.0% (-)"
    assert paired([100.0, 101.0, 99.0], [200.0, 202.0, 198.0]).decided, "the same change of three pairs is"


def search(capacity: float, start: float, n: int = 200) -> tuple[float, float | None, int]:
    draw = random.Random(1)

    async def measure(rate: float) -> Point:
        share = 0.97 if rate <= capacity else 0.5
        return Point(rate, n, sum(draw.random() < share for _ in range(n)))

    found = asyncio.run(search_capacity(measure, start))
    return found.rate, found.above, len(found.points)


@pytest.mark.parametrize("start", [1.0, 7.3, 100.0])
def test_the_search_ends_beside_the_known_capacity_from_either_side(start: float) -> None:
    rate, above, runs = search(10.0, start)
    assert rate <= 10.0 < (above or 0) and (above or 0) - rate <= 0.06 * (above or 0)
    assert runs <= 12


def test_a_short_run_cannot_prove_an_attainment() -> None:
    assert Point(1.0, 20, 20).outcome(0.9) == "undecided"
    assert Point(1.0, 29, 29).outcome(0.9) == "passes"
    assert Point(1.0, 100, 40).outcome(0.9) == "fails"
    assert Point(1.0, 100, 100, valid=False).outcome(0.9) == "fails"


def test_no_capacity_is_zero_and_bad_starts_are_refused() -> None:
    rate, _, runs = search(0.0, 4.0)
    assert rate == 0.0 and runs == 12
    with pytest.raises(InvalidRequest):
        search(1.0, 0.0)
    assert rates_between(1.0, 4.0, 2) == [2.0, 3.0]
