"""What a scheduler that decides by cost is told: steps as plan or step ledger predict them, swaps as measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from steelyard.core.step import RunnerCaps
from steelyard.engine.ledgers import Measure
from steelyard.ledger.book import StepBook
from steelyard.ledger.charges import LearnedCost
from steelyard.plan.predict import PredictedCost
from steelyard.scheduler.protocols import Cost

_MAX_KEPT = 4096


class EngineCost:
    """scheduler.protocols.Cost. The plan's model where the device is known, else what the last steps taught.

    A swap costs its blocks' bytes over the rate at which the start found them copied; without a host tier it is never
    cheaper than computing again.
    """

    def __init__(
        self, caps: RunnerCaps, block_bytes: Sequence[int], book: StepBook, measure: Measure | None = None
    ) -> None:
        self._caps = caps
        self._block_bytes = block_bytes
        learned = LearnedCost(book, caps.max_batched_tokens)
        self._steps: Cost = learned if measure is None else PredictedCost(measure.roofline, measure.calibration)
        self.step_ns = self._steps.step_ns
        self.recompute_ns = self._steps.recompute_ns
        if measure is not None:  # a prediction of the plan costs microseconds and stays what it is
            self.recompute_ns = lru_cache(_MAX_KEPT)(self._steps.recompute_ns)

    def swap_ns(self, num_tokens: int) -> int:
        """Moving the KV of `num_tokens` one way."""
        if not self._caps.host_bandwidth or not self._block_bytes:
            return self.recompute_ns(num_tokens)
        return round(self._kv_bytes(num_tokens) / self._caps.host_bandwidth * 1e9)

    def _kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the blocks that hold them; behind a window there are none."""
        size, total = self._caps.block_size, 0
        for group, block_bytes in zip(self._caps.groups, self._block_bytes):
            num_blocks = -(-num_tokens // size)
            if group.window is not None:
                seen = -(-group.window // size) + 1 + -(-group.keep_first // size)
                num_blocks = min(num_blocks, seen)
            total += num_blocks * block_bytes
        return total
