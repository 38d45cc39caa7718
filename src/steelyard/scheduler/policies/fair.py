"""Fair share of the device among tenants: the virtual token counter of Sheng et al. 2024 ("Fairness in Serving Large
Language Models", algorithm 2), counting attributed device time in place of tokens.

    counter of a tenant = (device ns charged to it + its prompts admitted and not yet charged) / its weight
    next in line: the tenant with the lowest counter, and of its requests the earliest

What is charged are the step ledger's shares: padding and overhead are nobody's, and what a preemption made the engine
compute again is left out.
"""

from __future__ import annotations

from collections.abc import Collection

from steelyard.core.request import Request
from steelyard.scheduler.policies.fcfs import Fcfs

_KEPT = 0.999
"""Of the sums behind the mean cost of a token, at each charge."""


class Fair(Fcfs):
    """Requests of the tenant that has had the most are preempted first, of those the one with
    least to lose, then the latest.

    A tenant that comes back is lifted to the lowest counter of those that wait: idling earns no credit. With nobody
    waiting, to that of the tenant that was admitted last, so that an empty queue earns none either.

    Bound (theorem 4.4 there): as long as two tenants have requests waiting, the device time of one per weight is at
    most 2 U ahead of the other's. U, over the smaller weight, is the larger of what one prompt costs and what all
    requests running at one time still cost: a tenant whose counter is above another's gets no new row.

    Starvation bound: a tenant's first waiting request is next once every other tenant has had U more than it.
    """

    changes = True
    weighs = True

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        self._advances_ns: dict[str, float] = {}
        self._last = ""
        self._recent_ns = 0.0
        self._recent_tokens = 0.0

    def counter(self, tenant: str) -> float:
        """Nanoseconds over the weight of `tenant`."""
        return self._counters.get(tenant, 0.0)

    def key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        return (self.counter(request.tenant), request.start_ns)

    def victim_key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        return (self.counter(request.tenant),)

    def activate(self, tenant: str, weight: float, others: Collection[str]) -> None:
        self._weights[tenant] = weight
        floor = min(map(self.counter, others)) if others else self.counter(self._last)
        self._counters[tenant] = max(self.counter(tenant), floor)

    def entered(self, request: Request) -> bool:
        """The prompt is charged when it is admitted, at the usual cost of a token, and settled as it is computed."""
        self._last = tenant = request.tenant
        if request.num_preemptions or not self._recent_tokens:
            return False
        num_tokens = len(request.tokens) - request.num_computed
        advance_ns = num_tokens * self._recent_ns / self._recent_tokens
        self._advances_ns[tenant] = self._advances_ns.get(tenant, 0.0) + advance_ns
        self._add(tenant, advance_ns)
        return True

    def charge(self, tenant: str, amount_ns: int, num_tokens: int) -> None:
        self._recent_ns = _KEPT * self._recent_ns + amount_ns
        self._recent_tokens = _KEPT * self._recent_tokens + num_tokens
        owed_ns = self._advances_ns.get(tenant, 0.0)
        self._advances_ns[tenant] = max(0.0, owed_ns - amount_ns)
        self._add(tenant, max(0.0, amount_ns - owed_ns))

    def may_pass(self, short: Request, head: Request) -> bool:
        return self.counter(short.tenant) <= self.counter(head.tenant)

    def _add(self, tenant: str, amount_ns: float) -> None:
        self._counters[tenant] = self.counter(tenant) + amount_ns / self._weights.get(tenant, 1.0)
