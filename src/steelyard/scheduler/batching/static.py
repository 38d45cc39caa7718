"""Static batching: a batch is filled, runs until its last member ends, and only then the next one is filled."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.core.request import Request
from steelyard.scheduler.protocols import Cost


class Static:
    """`batch_size` requests a batch; starts with fewer if no more are waiting."""

    def __init__(self, batch_size: int) -> None:
        assert batch_size >= 1
        self.batch_size = batch_size

    def may_join(self, waiting: Sequence[Request], num_running: int, now_ns: int) -> int:
        return self.batch_size if num_running == 0 else 0

    def budget(self, num_running: int, now_ns: int, cost: Cost | None) -> int | None:
        return None
