"""The little queueing theory a planner needs: mean wait, its tail, and Little's law. No model, no device."""

from __future__ import annotations

import math
from dataclasses import dataclass


def mean_wait(rate: float, service_s: float, arrival_cv: float = 1.0, service_cv: float = 0.0) -> float:
    """Mean time in queue before one server, infinite where it is overloaded.

    Allen and Cunneen's form for general arrivals and service, exact for Poisson arrivals: with constant service
    (service_cv 0) it is M/D/1, R * D^2 / (2 * (1 - R * D)).
    """
    load = rate * service_s
    if load >= 1.0:
        return math.inf
    return (arrival_cv**2 + service_cv**2) / 2.0 * load / (1.0 - load) * service_s


def share_waiting_less(limit_s: float, load: float, wait_s: float) -> float:
    """Share of requests whose wait is at most `limit_s`, given the server's load and the mean wait.

    A request waits at all with probability `load`, and then for an exponential time (heavy-traffic form; exact for
    M/M/1, conservative for M/D/1).
    """
    if limit_s < 0.0:
        return 0.0
    if wait_s == 0.0 or load == 0.0:
        return 1.0
    if math.isinf(wait_s):
        return 0.0
    return 1.0 - load * math.exp(-load * limit_s / wait_s)


def wait_quantile(share: float, load: float, wait_s: float) -> float:
    """The wait that `share` of requests do not exceed: the inverse of `share_waiting_less`."""
    if wait_s == 0.0 or load == 0.0 or 1.0 - share >= load:
        return 0.0
    return -math.log((1.0 - share) / load) * wait_s / load


@dataclass(frozen=True, slots=True)
class Little:
    """Little's law as a check: requests in flight counted by where they are, against rate times latency."""

    in_flight: float
    rate: float
    latency_s: float

    @property
    def residual(self) -> float:
        """|L - rate * W| / L; above 0.05 something was not counted."""
        if self.in_flight == 0.0:
            return 0.0
        return abs(self.in_flight - self.rate * self.latency_s) / self.in_flight
