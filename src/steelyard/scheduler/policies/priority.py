"""Priority numbers, lower first, with aging: a class is worth so much waiting, and no more.

    place in line = arrival + priority * aging

As everybody ages alike, that place is fixed at arrival: nothing is sorted again.
"""

from __future__ import annotations

from steelyard.core.request import Request
from steelyard.scheduler.policies.fcfs import Fcfs

AGING_NS = 60_000_000_000
MAX_DISPLACED = 2
"""A request that was preempted this often is not displaced by class any more."""


class Priority(Fcfs):
    """The least urgent are preempted first, of those the one with least to lose, then the latest arrival.

    A waiting request also displaces running ones of a less urgent class that came too late to have outlived it.
    The displaced cannot displace it in turn, and each only so often: nobody goes to and fro.

    Starvation bound: before a request of priority p go only those of priority q < p that arrive less than
    (p - q) * aging after it. Once they are served, it is.
    """

    def __init__(self, aging_ns: int = AGING_NS) -> None:
        assert aging_ns > 0
        self._aging_ns = aging_ns

    def key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        return (request.start_ns + request.priority * self._aging_ns,)

    def victim_key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        return (request.priority,)

    def may_displace(self, waiting: Request, running: Request) -> bool:
        more_urgent = waiting.priority < running.priority and waiting.order_key < running.order_key
        return more_urgent and running.num_preemptions < MAX_DISPLACED

    def may_pass(self, short: Request, head: Request) -> bool:
        return short.priority <= head.priority
