"""Priority numbers, lower first; arrival order among equals."""

from __future__ import annotations

from steelyard.core.request import Request
from steelyard.scheduler.policies.fcfs import Fcfs


class Priority(Fcfs):
    """The least urgent, and of those the latest arrival, is preempted first."""

    def key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        return (request.priority, request.start_ns)
