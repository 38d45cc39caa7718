"""Statistics a report may quote: quantiles with intervals, sample sizes, binomial bounds, t intervals. Plain numbers.

Quantiles are linear between order statistics (numpy's default). Intervals of quantiles come from order statistics and
assume nothing about the distribution; sample sizes are those of MLPerf's early stopping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of n values and its 95 % interval. `quotable`: n can support it as pass or fail (99 % confidence)."""

    value: float
    low: float
    high: float
    n: int
    quotable: bool


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of n values with a two-sided t interval; low and high are the mean where n is 1."""

    mean: float
    low: float
    high: float
    n: int


def quantile_of(ordered: Sequence[float], q: float) -> float:
    """Linear between the two nearest of ordered values."""
    assert ordered, "a quantile of nothing"
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def quantile(ordered: Sequence[float], q: float, confidence: float = 0.95) -> Quantile:
    """A quantile with its interval: the order statistics that a binomial count falls between."""
    n, tail = len(ordered), (1.0 - confidence) / 2.0
    low = _first(lambda k: binomial_cdf(k, n, q) > tail, n)
    high = _first(lambda k: binomial_cdf(k, n, q) >= 1.0 - tail, n)
    least = ordered[min(max(low - 1, 0), n - 1)]
    most = ordered[min(high, n - 1)]
    return Quantile(quantile_of(ordered, q), least, most, n, n >= min_samples(q))


def min_samples(q: float, num_over: int = 0, confidence: float = 0.99) -> int:
    """Least n at which `num_over` values above a limit still show that a share q lies under it (MLPerf's rule)."""
    assert 0.0 < q < 1.0
    low, high = num_over + 1, num_over + 2
    while binomial_cdf(num_over, high, 1.0 - q) > 1.0 - confidence:
        low, high = high, high * 2
    while low < high:
        middle = (low + high) // 2
        if binomial_cdf(num_over, middle, 1.0 - q) > 1.0 - confidence:
            low = middle + 1
        else:
            high = middle
    return low


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X <= k)."""
    if k < 0:
        return 0.0
    if k >= n:
        return 1.0
    return incomplete_beta(n - k, k + 1, 1.0 - p)


def share_lower(good: int, n: int, confidence: float = 0.95) -> float:
    """One-sided lower bound of a share (Clopper and Pearson, 1934): no larger share is excluded by bad luck."""
    if good == 0 or n == 0:
        return 0.0
    return _solve(lambda p: binomial_cdf(good - 1, n, p) - confidence)


def share_upper(good: int, n: int, confidence: float = 0.95) -> float:
    """One-sided upper bound of a share."""
    return 1.0 - share_lower(n - good, n, confidence)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean with a t interval, for repeats of a run."""
    n, mean = len(values), fmean(values)
    if n < 2:
        return Interval(mean, mean, mean, n)
    half = t_quantile(0.5 + confidence / 2.0, n - 1) * stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Standard deviation over mean; 0 for fewer than two values."""
    mean = fmean(values)
    return stdev(values) / mean if len(values) > 1 and mean else 0.0


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least-squares slope of y over x and its t value (slope over standard error); (0, 0) without enough points."""
    n = len(points)
    if n < 3:
        return 0.0, 0.0
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    var_x = sum((x - mean_x) ** 2 for x, _ in points)
    if var_x == 0.0:
        return 0.0, 0.0
    found = sum((x - mean_x) * (y - mean_y) for x, y in points) / var_x
    error = sum((y - mean_y - found * (x - mean_x)) ** 2 for x, y in points)
    spread = math.sqrt(error / (n - 2) / var_x)
    if spread == 0.0:
        return found, math.inf if found > 0 else -math.inf if found < 0 else 0.0
    return found, found / spread


def t_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t, for p of one half or more."""
    assert 0.5 <= p < 1.0
    x = _solve(lambda x: incomplete_beta(degrees / 2.0, 0.5, 1.0 - x) - 2.0 * (1.0 - p))
    kept = 1.0 - x
    return math.sqrt(degrees * (1.0 / kept - 1.0)) if kept > 0.0 else math.inf


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by Lentz's continued fraction (DLMF 8.17.22)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    d = 1.0 / _away(1.0 - (a + b) * x / (a + 1.0), tiny)
    c, fraction = 1.0, d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        step = 1.0
        for term in (even, odd):
            d = 1.0 / _away(1.0 + term * d, tiny)
            c = _away(1.0 + term / c, tiny)
            step = c * d
            fraction *= step
        if abs(step - 1.0) < 1e-14:
            break
    return front * fraction / a


def _away(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def _solve(falling: Callable[[float], float]) -> float:
    """The root in (0, 1) of a function that falls."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if falling(middle) > 0.0 else (low, middle)
    return (low + high) / 2.0


def _first(true_from: Callable[[int], bool], n: int) -> int:
    """Least k in [0, n] at which a condition that stays true becomes true."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if true_from(middle) else (middle + 1, high)
    return low
