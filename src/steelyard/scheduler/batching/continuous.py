"""Continuous batching: a waiting request joins as soon as there is a row, budget and memory."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.core.request import Request
from steelyard.scheduler.protocols import Cost


class Continuous:
    held_slots = 0

    def may_join(self, waiting: Sequence[Request], num_running: int, now_ns: int) -> int:
        return len(waiting)

    def budget(self, num_running: int, now_ns: int, cost: Cost | None) -> int | None:
        return None
