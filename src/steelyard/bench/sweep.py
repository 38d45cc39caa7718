"""From one request at a time to past the knee, and the largest rate that meets its targets. Runs are handed in.

Capacity is searched between a rate that passes and one that fails. A rate passes only if the lower confidence bound of
its attainment reaches the target, and fails only if the upper bound is under it; between them the run is too short to
say, and counts as not passing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from steelyard.bench.stats import share_lower, share_upper
from steelyard.errors import InvalidRequest

Measure = Callable[[float], Awaitable["Point"]]
Outcome = Literal["passes", "fails", "undecided"]


@dataclass(frozen=True, slots=True)
class Point:
    """One run at a rate: how many of all scheduled met every target, and the report behind it."""

    rate: float
    scheduled: int
    met: int
    valid: bool = True
    report: Any = field(default=None, compare=False)

    def outcome(self, attainment: float) -> Outcome:
        if self.valid and share_lower(self.met, self.scheduled) >= attainment:
            return "passes"
        if share_upper(self.met, self.scheduled) < attainment or not self.valid:
            return "fails"
        return "undecided"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest rate shown to pass (0: none was), the smallest that did not, and every point measured."""

    rate: float
    above: float | None
    points: tuple[Point, ...]
    attainment: float


async def search_capacity(
    measure: Measure, start: float, *, attainment: float = 0.9, tolerance: float = 0.05, most_runs: int = 12
) -> Capacity:
    """Double from `start` until a rate does not pass (or halve until one does), then bisect to the tolerance."""
    if not 0.0 < start < float("inf"):
        raise InvalidRequest(f"--start-rate must be above 0, got {start:g}", param="start_rate")
    points: list[Point] = []

    async def passes(rate: float) -> bool:
        point = await measure(rate)
        points.append(point)
        return point.outcome(attainment) == "passes"

    low, high, rate = 0.0, None, start
    while len(points) < most_runs:
        if await passes(rate):
            low = max(low, rate)
        else:
            high = rate if high is None else min(high, rate)
        if high is None:
            rate = 2.0 * low
        elif low == 0.0:
            rate = high / 2.0
        elif high - low <= tolerance * high:
            break
        else:
            rate = (low + high) / 2.0
    return Capacity(low, high, tuple(sorted(points, key=lambda p: p.rate)), attainment)


def rates_between(low: float, high: float, count: int) -> list[float]:
    """Evenly spaced rates, the ends left out: one at a time and saturation give the ends."""
    return [low + (high - low) * (i + 1) / (count + 1) for i in range(count)]
