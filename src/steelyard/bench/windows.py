"""In-flight over time, the steady part of a run, and Little's law over it. From records; no statistics of latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from steelyard.bench.record import RequestRecord
from steelyard.bench.stats import quantile_of

Curve = Sequence[tuple[int, int]]
_CELLS = 200
_SMOOTH = 9
_PLATEAU_SHARE = 0.9
_LEAST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run, start <= t < end in nanoseconds."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return max(self.end_ns - self.start_ns, 1) / 1e9

    def has(self, t_ns: int) -> bool:
        return self.start_ns <= t_ns < self.end_ns


def whole_run(records: Sequence[RequestRecord]) -> Window:
    """From the first send to the last token, as other tools count; the end itself is inside."""
    sends = [r.send_ns for r in records if r.send_ns is not None]
    lasts = [r.events[-1].t_ns for r in records if r.events]
    ends = lasts or [r.done_ns for r in records if r.done_ns is not None]
    start_ns = min(sends, default=0)
    return Window("whole run", start_ns, max(ends, default=start_ns) + 1)


def in_flight(records: Sequence[RequestRecord]) -> list[tuple[int, int]]:
    """(time, requests between send and end) at each change."""
    changes: dict[int, int] = {}
    for record in records:
        if record.send_ns is not None and record.done_ns is not None:
            changes[record.send_ns] = changes.get(record.send_ns, 0) + 1
            changes[record.done_ns] = changes.get(record.done_ns, 0) - 1
    now, curve = 0, []
    for t_ns in sorted(changes):
        now += changes[t_ns]
        curve.append((t_ns, now))
    return curve


def mean_level(curve: Curve, window: Window) -> float:
    """Time average of a step curve over a window."""
    area, before = 0, 0
    last_ns = window.start_ns
    for t_ns, level in curve:
        here = min(max(t_ns, window.start_ns), window.end_ns)
        area += before * (here - last_ns)
        last_ns, before = here, level
    area += before * (window.end_ns - last_ns)
    return area / max(window.end_ns - window.start_ns, 1)


def cells(curve: Curve, window: Window, count: int = _CELLS) -> list[tuple[float, float]]:
    """(seconds from the window's start, mean level) of equal cells."""
    edges = [window.start_ns + (window.end_ns - window.start_ns) * i // count for i in range(count + 1)]
    found, at, level = [], 0, 0
    for low, high in pairwise(edges):
        area, last = 0, low
        while at < len(curve) and curve[at][0] < high:
            t_ns = max(curve[at][0], low)
            area += level * (t_ns - last)
            last, level = t_ns, curve[at][1]
            at += 1
        area += level * (high - last)
        found.append(((low + high) / 2e9 - window.start_ns / 1e9, area / max(high - low, 1)))
    return found


def steady(curve: Curve, window: Window) -> Window | None:
    """The longest part in which smoothed in-flight is at least 90 % of its plateau; None: there is no such part.

    The plateau is the 80th percentile of the smoothed curve, so a ramp and a drain do not lower it. A part shorter
    than a fifth of the run is no steady state.
    """
    levels = [level for _, level in cells(curve, window)]
    half = _SMOOTH // 2
    smooth = []
    for i in range(len(levels)):
        near = levels[max(i - half, 0) : i + half + 1]
        smooth.append(sum(near) / len(near))
    plateau = quantile_of(sorted(smooth), 0.8)
    if plateau <= 0.0:
        return None
    best, start = (0, 0), None
    for i, level in enumerate([*smooth, -1.0]):
        if level >= _PLATEAU_SHARE * plateau:
            start = i if start is None else start
        elif start is not None:
            best, start = max(best, (start, i), key=lambda part: part[1] - part[0]), None
    low, high = best
    if high - low < _LEAST_SHARE * len(levels):
        return None
    length = window.end_ns - window.start_ns
    return Window(
        "steady", window.start_ns + length * low // len(levels), window.start_ns + length * high // len(levels)
    )


@dataclass(frozen=True, slots=True)
class LittleCheck:
    """L (time average in flight) against lambda * W (arrivals a second times mean time in flight)."""

    mean_in_flight: float
    rate: float
    mean_time_s: float

    @property
    def residual(self) -> float:
        """abs(L - lambda * W) / L; 0 where nothing was in flight."""
        if self.mean_in_flight == 0.0:
            return 0.0
        return abs(self.mean_in_flight - self.rate * self.mean_time_s) / self.mean_in_flight

    @property
    def gap_ms(self) -> float:
        """The same as milliseconds a request: the client's own work around a request is some tenths of one."""
        return 1e3 * abs(self.mean_in_flight / self.rate - self.mean_time_s) if self.rate else 0.0


def little(records: Sequence[RequestRecord], curve: Curve, window: Window) -> LittleCheck:
    """`curve` should be the load generator's own count: then a lost or doubled record shows as a residual."""
    times = [
        r.done_ns - r.send_ns
        for r in records
        if r.send_ns is not None and r.done_ns is not None and window.has(r.send_ns)
    ]
    mean_s = sum(times) / len(times) / 1e9 if times else 0.0
    return LittleCheck(mean_level(curve, window), len(times) / window.seconds, mean_s)
