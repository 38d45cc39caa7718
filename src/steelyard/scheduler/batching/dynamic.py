"""Dynamic batching: as static, but a batch starts when it is full or its first member has waited long enough."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.core.request import Request
from steelyard.scheduler.protocols import Cost


class Dynamic:
    """`batch_size` requests a batch, or what has come `max_wait_ns` after the oldest of them arrived."""

    def __init__(self, batch_size: int, max_wait_ns: int) -> None:
        assert batch_size >= 1 and max_wait_ns >= 0
        self.batch_size = batch_size
        self.max_wait_ns = max_wait_ns

    def may_join(self, waiting: Sequence[Request], num_running: int, now_ns: int) -> int:
        if num_running:
            return 0
        full = len(waiting) >= self.batch_size
        return self.batch_size if full or self._waited_long(waiting, now_ns) else 0

    def budget(self, num_running: int, now_ns: int, cost: Cost | None) -> int | None:
        return None

    def _waited_long(self, waiting: Sequence[Request], now_ns: int) -> bool:
        return any(now_ns - request.start_ns >= self.max_wait_ns for request in waiting[: self.batch_size])
