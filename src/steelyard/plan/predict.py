"""Predicted nanoseconds for whoever decides by cost, a scheduler above all: the calibrated model in plain integers."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.plan.calibration import Calibration
from steelyard.plan.costs import Chunk
from steelyard.plan.roofline import Roofline


@dataclass(frozen=True, slots=True)
class PredictedCost:
    """What steps, recomputing and swapping are expected to take."""

    roofline: Roofline
    calibration: Calibration

    def step_ns(self, num_tokens: int, num_rows: int, context_tokens: int) -> int:
        """A step of `num_tokens` new tokens in `num_rows` rows that have `context_tokens` in all after it.

        What exceeds one token a row is taken to be one row's prompt; rows are taken to be equally long.
        """
        if num_tokens < 1 or num_rows < 1:
            return 0
        each = max(context_tokens // num_rows, 1)
        if num_tokens <= num_rows:
            chunks: tuple[Chunk, ...] = (Chunk(1, each, num_tokens),)
        else:
            new = num_tokens - (num_rows - 1)
            chunks = (Chunk(new, max(each, new)),)
            if num_rows > 1:
                chunks += (Chunk(1, each, num_rows - 1),)
        return self.calibration.estimate(self.roofline, chunks).ns

    def recompute_ns(self, num_tokens: int) -> int:
        """Computing the KV of `num_tokens` again in a step of its own."""
        return self.calibration.estimate(self.roofline, (Chunk(num_tokens, num_tokens, 1, 0),)).ns

    def swap_ns(self, num_tokens: int) -> int:
        """Moving the KV of `num_tokens` between device and host, one way."""
        return round(self.roofline.costs.kv_bytes(num_tokens) / self.roofline.setup.device.host_bandwidth * 1e9)
