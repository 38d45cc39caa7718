"""Quantiles, sample sizes and bounds against numpy, published tables and brute force."""

from __future__ import annotations

import math
import random
from math import comb

import numpy as np
import pytest

from steelyard.bench.stats import (
    binomial_cdf,
    mean_interval,
    min_samples,
    quantile,
    quantile_of,
    share_lower,
    share_upper,
    slope,
    t_quantile,
)


@pytest.mark.parametrize("q", [0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_numpys(q: float) -> None:
    values = sorted(random.Random(1).gauss(0, 1) for _ in range(57))
    assert quantile_of(values, q) == pytest.approx(np.quantile(values, q))


@pytest.mark.parametrize(
    ("q", "num_over", "n"),
    [(0.9, 0, 44), (0.9, 1, 64), (0.9, 5, 127), (0.9, 10, 197)]
    + [(0.99, 0, 459), (0.99, 1, 662), (0.99, 5, 1307), (0.99, 10, 2010)],
)
def test_sample_sizes_are_those_of_mlperfs_table(q: float, num_over: int, n: int) -> None:
    assert min_samples(q, num_over) == n


def test_p99_of_a_hundred_requests_is_not_quotable() -> None:
    values = [float(i) for i in range(100)]
    assert not quantile(values, 0.99).quotable
    assert quantile(values, 0.9).quotable
    assert quantile(values, 0.99).high == 99.0


@pytest.mark.parametrize(("k", "n", "p"), [(0, 5, 0.3), (3, 10, 0.5), (40, 100, 0.35), (990, 1000, 0.99)])
def test_binomial_sums(k: int, n: int, p: float) -> None:
    exact = sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
    assert binomial_cdf(k, n, p) == pytest.approx(exact, rel=1e-9)


def test_share_bounds_are_clopper_and_pearsons() -> None:
    assert share_lower(10, 10) == pytest.approx(0.05 ** (1 / 10))
    assert share_lower(0, 10) == 0.0 and share_upper(10, 10) == 1.0
    low = share_lower(90, 100)
    assert binomial_cdf(89, 100, low) == pytest.approx(0.95)


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227)])
def test_t_quantiles_are_the_tables(degrees: int, t: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(t, rel=1e-4)


def test_quantile_intervals_cover_the_truth() -> None:
    draw, covered = random.Random(7), 0
    for _ in range(300):
        found = quantile(sorted(draw.random() for _ in range(60)), 0.5)
        covered += found.low <= 0.5 <= found.high
    assert covered >= 0.93 * 300


def test_interval_of_repeats() -> None:
    found = mean_interval([10.0, 12.0, 14.0])
    assert (found.mean, found.n) == (12.0, 3)
    assert found.high - found.mean == pytest.approx(4.30265 * 2 / math.sqrt(3), rel=1e-4)
    assert mean_interval([5.0]).low == 5.0


def test_slope_and_its_t_value() -> None:
    assert slope([(float(x), 2.0 * x) for x in range(10)]) == (2.0, math.inf)
    draw = random.Random(3)
    _, flat = slope([(float(x), draw.gauss(0, 1)) for x in range(200)])
    assert abs(flat) < 3
