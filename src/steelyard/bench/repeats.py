"""Several runs of one configuration, and pairs of runs of two: what may be said of them. Numbers in, verdict out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from steelyard.bench.stats import coefficient_of_variation, mean_interval
from steelyard.core.digits import in_digits

STABLE_CV = 0.05
LEAST_PAIRS = 3
_MAX_LOG = 700.0  # of a double


@dataclass(frozen=True, slots=True)
class Repeats:
    """One figure over repeats. `stable` False: no single number may be quoted for it."""

    values: tuple[float, ...]
    median: float
    spread: float
    cv: float
    stable: bool

    @property
    def verdict(self) -> str:
        shown = ", ".join(in_digits(v) for v in self.values)
        if len(self.values) < 3:
            return f"{len(self.values)} runs ({shown}): at least 3 are needed to call it stable"
        word = "stable" if self.stable else "NOT STABLE: no number may be quoted"
        return f"median {in_digits(self.median)}, runs {shown}, variation {self.cv:.1%}: {word}"


def repeats(values: Sequence[float]) -> Repeats:
    """Stable: at least three runs whose coefficient of variation is at most 5 %."""
    cv = coefficient_of_variation(values)
    return Repeats(tuple(values), median(values), max(values) - min(values), cv, len(values) >= 3 and cv <= STABLE_CV)


@dataclass(frozen=True, slots=True)
class Change:
    """From A to B, 0.1 for a tenth more: the mean of n pairs and its interval, None where they are too few for one."""

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Paired:
    """B against A over pairs that ran side by side with the same seed."""

    relative: Change
    decided: bool


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """The t interval of the logarithm of B over A, taken back: the drift of a machine is in both members of a pair and
    leaves their ratio, and no bound lies below -1, as one of a difference may. Decided: 0 is outside. All are above 0.

    Fewer than LEAST_PAIRS have no interval and decide nothing: one says nothing of noise, and the t quantile of two is
    12.7, so that their bounds are of any size.
    """
    assert len(a) == len(b) and a, "pairs need both members"
    assert min(*a, *b) > 0.0, "a ratio needs figures above 0"
    found = mean_interval([math.log(y) - math.log(x) for x, y in zip(a, b)])
    mean, low, high = (math.expm1(min(value, _MAX_LOG)) for value in (found.mean, found.low, found.high))
    if found.n < LEAST_PAIRS:
        return Paired(Change(mean, None, None, found.n), decided=False)
    return Paired(Change(mean, low, high, found.n), decided=not low <= 0.0 <= high)
