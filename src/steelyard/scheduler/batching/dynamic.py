"""Dynamic batching: batches by a window of time. Who comes while a batch runs waits for its end, as in a static one."""

from __future__ import annotations

from steelyard.scheduler.batching.static import Static

WINDOW_NS = 50_000_000


class Dynamic(Static):
    """`batch_size` requests a batch, or what has come `max_wait_ns` after the oldest of them arrived."""

    def __init__(self, batch_size: int, max_wait_ns: int = WINDOW_NS) -> None:
        super().__init__(batch_size, max_wait_ns)
