"""First come, first served."""

from __future__ import annotations

from steelyard.core.request import Request


class Fcfs:
    """Arrival order. A preempted request keeps its place; the latest arrival is preempted first."""

    changes = False

    def key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        return (request.start_ns,)

    def victim_key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        return request.order_key
