"""Vectors of whole sequences: the final hidden states of a step's new positions, the last one or their mean.

A prompt computed in chunks gives one mean a chunk; who planned them weighs them by their positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from steelyard.core.step import RowWork, Want


def pooled(work: Sequence[RowWork], hidden: Tensor) -> list[tuple[int, Tensor]]:
    """(index into work, float32 [H]) of every item that wants it; `hidden` [T, H] is packed in the order of `work`."""
    found: list[tuple[int, Tensor]] = []
    first = 0
    for index, item in enumerate(work):
        last = first + item.num_new
        if Want.POOL_MEAN in item.want:
            found.append((index, hidden[first:last].float().mean(dim=0)))
        elif Want.POOL_LAST in item.want:
            found.append((index, hidden[last - 1].float().clone()))
        first = last
    return found
