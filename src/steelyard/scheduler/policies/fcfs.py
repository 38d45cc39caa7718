"""First come, first served: the order of arrival, and what the other orders have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from steelyard.core.request import Request
from steelyard.scheduler.rows import Resident


class Fcfs:
    """Arrival order. A preempted request keeps its place; of those with equal KV to lose the latest is preempted first.

    Starvation bound: none but earlier arrivals and short prompts go before a request, and of these at most
    `SchedulerOptions.max_passes` while it lacks a row or blocks.
    """

    changes = False
    weighs = False

    def look(self, running: Sequence[Request], now_ns: int) -> None:
        """Nothing changes."""

    def key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        return (request.start_ns,)

    def victim_key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        return ()

    def over_share(self, request: Request) -> bool:
        return False

    def activate(self, tenant: str, weight: float, others: Collection[str]) -> None:
        """Tenants are all one."""

    def budget(self, decodes: Sequence[Resident], most: int, now_ns: int) -> int:
        return most

    def entered(self, request: Request) -> bool:
        return False

    def charge(self, tenant: str, amount_ns: int, num_tokens: int) -> None:
        """Nothing is kept."""

    def may_displace(self, waiting: Request, running: Request) -> bool:
        return False

    def may_pass(self, short: Request, head: Request) -> bool:
        return True
