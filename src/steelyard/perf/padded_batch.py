"""The KV of a static batch: prompts padded to the longest, rows held until the longest answer ends. Arithmetic only.

Step 1 computes the prompts, each later one a token of every row. After step s every row holds longest + s - 1 slots;
the row of (prompt, answer) needs prompt + s - 1 of them while s <= answer, and none afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvHeld:
    """KV of a whole run, in any unit of size (tokens, bytes), sampled after each step.

    peak         the most held at once, and `peak_needed` what of it live requests needed then
    most_needed  the most that live requests ever needed at once
    mean_share   needed over held, both summed over the steps
    """

    peak: float
    peak_needed: float
    most_needed: float
    mean_share: float

    @classmethod
    def of(cls, samples: Sequence[tuple[float, float]]) -> KvHeld:
        """`samples`: (held, needed) of each step; at least one that holds something."""
        held = sum(h for h, _ in samples)
        assert held > 0, "nothing was ever held"
        peak, at_peak = max(samples)
        return cls(peak, at_peak, max(n for _, n in samples), sum(n for _, n in samples) / held)

    def scaled(self, unit: float) -> KvHeld:
        """The same in another unit, such as bytes of a token."""
        return KvHeld(self.peak * unit, self.peak_needed * unit, self.most_needed * unit, self.mean_share)


def static_samples(lens: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(tokens held, tokens needed) after each step of a batch of (prompt, answer) requests, left-padded."""
    longest = max(prompt for prompt, _ in lens)
    steps = max(answer for _, answer in lens)
    return [
        (len(lens) * (longest + s - 1), sum(prompt + s - 1 for prompt, answer in lens if s <= answer))
        for s in range(1, steps + 1)
    ]
