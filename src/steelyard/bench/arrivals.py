"""When requests are to be sent: the whole schedule at once, from a seed. No clock, no sending.

Gaps are drawn up front and rescaled to the exact total, so that two schedules that differ in burstiness alone offer the
same load over the same time, and a comparison of them is not one of luck.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, pstdev
from typing import Literal

from steelyard.errors import InvalidRequest

Process = Literal["closed", "constant", "poisson", "gamma", "trace"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests arrive.

    process      "closed": `concurrency` slots that each send when the last answer has ended
    rate         requests a second (open loops)
    burstiness   shape k of gamma gaps, whose coefficient of variation is 1 / sqrt(k); 1 is Poisson, below is burstier
    concurrency  slots of a closed loop, or a cap on an open one (None: no cap), whose wait counts in user latency
    ramp_s       over which the slots of a closed loop begin, so that they do not prefill all at once
    """

    process: Process = "closed"
    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    ramp_s: float = 0.0
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.process == "closed" and not self.concurrency:
            raise InvalidRequest("--max-concurrency: a closed loop needs a number of slots", param="max_concurrency")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidRequest(f"--max-concurrency must be at least 1, got {self.concurrency}")
        if self.process in ("constant", "poisson", "gamma") and not (self.rate and 0 < self.rate < float("inf")):
            raise InvalidRequest(f"--request-rate must be above 0, got {self.rate}", param="request_rate")
        if not 0 < self.burstiness < float("inf"):
            raise InvalidRequest(f"--burstiness must be above 0, got {self.burstiness:g}", param="burstiness")
        if self.ramp_s < 0 or self.think_s < 0:
            raise InvalidRequest("--ramp and --think-time must not be negative")

    @property
    def open(self) -> bool:
        return self.process != "closed"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Seconds from the start at which each request is due (empty for a closed loop), and what was achieved."""

    at_s: tuple[float, ...]
    rate: float | None
    cv: float | None
    digest: str


def make_schedule(arrivals: Arrivals, num_requests: int, seed: int) -> Schedule:
    """The schedule of `num_requests`, the same for the same arguments. The first is due one gap after the start."""
    if not arrivals.open:
        return _described((), f"closed {arrivals.concurrency} {arrivals.ramp_s}")
    assert arrivals.rate is not None, "a trace has its own times"
    if arrivals.process == "constant":
        gaps = [1.0] * num_requests
    else:
        draw = random.Random(f"arrivals {seed}")
        shape = 1.0 if arrivals.process == "poisson" else arrivals.burstiness
        gaps = [draw.gammavariate(shape, 1.0) for _ in range(num_requests)]
    scale = num_requests / arrivals.rate / sum(gaps)
    return _described(tuple(accumulate(gap * scale for gap in gaps)))


def replay(at_s: Sequence[float], time_scale: float = 1.0) -> Schedule:
    """A trace's own times from its first request on; `time_scale` 2 replays it half as fast."""
    if not 0 < time_scale < float("inf"):
        raise InvalidRequest(f"--time-scale must be above 0, got {time_scale:g}", param="time_scale")
    start = min(at_s, default=0.0)
    return _described(tuple(sorted((t - start) * time_scale for t in at_s)))


def _described(at_s: tuple[float, ...], what: str = "") -> Schedule:
    digest = hashlib.sha256((what + repr([round(t * 1e9) for t in at_s])).encode()).hexdigest()[:16]
    gaps = [b - a for a, b in pairwise((0.0, *at_s))] if len(at_s) > 1 else []
    mean = fmean(gaps) if gaps else 0.0
    if not mean:
        return Schedule(at_s, None, None, digest)
    return Schedule(at_s, 1.0 / mean, pstdev(gaps) / mean, digest)
