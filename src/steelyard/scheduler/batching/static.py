"""Static batching: a batch is filled, runs until its last member ends, and only then the next one is filled.

slot 0  [ A A A A A A A A ][ D D ...          a member that ends early leaves its slot empty until the batch ends
slot 1  [ B B B . . . . . ][ E E ...
"""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.core.request import Request
from steelyard.scheduler.protocols import Cost


class Static:
    """`batch_size` requests a batch; it starts with fewer once the oldest has waited `max_wait_ns`.

    held_slots  slots of members that had ended, counted once for each step of their batch: nothing is computed in them
    """

    def __init__(self, batch_size: int, max_wait_ns: int = 0) -> None:
        assert batch_size >= 1 and max_wait_ns >= 0
        self.batch_size = batch_size
        self.max_wait_ns = max_wait_ns
        self.held_slots = 0
        self._num_members = 0

    def may_join(self, waiting: Sequence[Request], num_running: int, now_ns: int) -> int:
        if num_running:
            return 0
        full = len(waiting) >= self.batch_size
        return self.batch_size if full or self._waited_long(waiting, now_ns) else 0

    def budget(self, num_running: int, now_ns: int, cost: Cost | None) -> int | None:
        self._num_members = max(self._num_members, num_running) if num_running else 0
        self.held_slots += self._num_members - num_running
        return None

    def _waited_long(self, waiting: Sequence[Request], now_ns: int) -> bool:
        return any(now_ns - request.start_ns >= self.max_wait_ns for request in waiting[: self.batch_size])
