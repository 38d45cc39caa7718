"""A step as the host writes it: one pinned buffer of int32 words, uploaded in one copy (layout: kernels/step.py).

host     slot 0 | slot 1 | slot 2     a slot is written again only after its step was collected
device   one frame                    stream order keeps a step's copy behind the step before it
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steelyard.core.step import RowEnter, RowWork, TableEdit
from steelyard.kernels import step
from steelyard.kernels.step import FrameLayout, StateLayout
from steelyard.runner.rows import sampling_words

NUM_SLOTS = 3
"""Steps in flight at most (two), and one being written."""

Pairs = NDArray[np.int32]


class Slot:
    """One step's host buffers: the frame's words, and where its results arrive.

    result   int32 [max_rows] in host memory that the device writes
    events   start and end of the step on the device; None on a CPU
    """

    def __init__(self, layout: FrameLayout, frame: Tensor) -> None:
        pinned = frame.device.type == "cuda"
        host = torch.zeros(layout.num_words, dtype=torch.int32, pin_memory=pinned)
        self._layout = layout
        self._arange = np.arange(layout.max_rows, dtype=np.int32)
        self.words: NDArray[np.int32] = host.numpy()
        self.result = torch.zeros(layout.max_rows, dtype=torch.int32, pin_memory=pinned)
        self.ids: NDArray[np.int32] = self.result.numpy()
        self.events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if pinned:
            self.events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self.in_use = False
        sizes = [0, *(2**k for k in range(6, 24) if 2**k < layout.max_patches), layout.max_patches]
        self._sizes = np.array(sizes)
        ends = [layout.patches + 2 * size for size in sizes]
        self._views = [(frame[:end], host[:end]) for end in ends]

    def write_decode(self, rows: Sequence[int], starts: Sequence[int]) -> None:
        """Every row has one new token and is sampled."""
        layout, words, count = self._layout, self.words, len(rows)
        words[: step.NUM_SAMPLED + 1] = count
        words[layout.rows : layout.rows + count] = rows
        words[layout.starts : layout.starts + count] = starts
        words[layout.q_start : layout.q_start + count] = self._arange[:count]
        words[layout.q_start + count] = count
        words[layout.sampled : layout.sampled + count] = self._arange[:count]

    def write(self, work: Sequence[RowWork], sampled: Sequence[int]) -> None:
        """Any work, in the order of the batch; `sampled` are indexes into it."""
        layout, words, count = self._layout, self.words, len(work)
        counts = np.fromiter((w.num_new for w in work), np.int32, count)
        words[step.NUM_ROWS] = count
        words[step.NUM_TOKENS] = counts.sum()
        words[step.NUM_SAMPLED] = len(sampled)
        words[layout.rows : layout.rows + count] = [w.row for w in work]
        words[layout.starts : layout.starts + count] = [w.start for w in work]
        words[layout.q_start] = 0
        np.cumsum(counts, out=words[layout.q_start + 1 : layout.q_start + count + 1])
        words[layout.sampled : layout.sampled + len(sampled)] = sampled

    def write_patches(self, pairs: Pairs | None) -> None:
        """Pairs [P, 2], at most max_patches; None: nothing changes."""
        count = 0 if pairs is None else len(pairs)
        self.words[step.NUM_PATCHES] = count
        if pairs is not None:
            first = self._layout.patches
            self.words[first : first + 2 * count] = pairs.reshape(-1)

    def upload(self) -> None:
        """Copy what was written to the device's frame, without waiting."""
        index = int(self._sizes.searchsorted(self.words[step.NUM_PATCHES]))
        target, source = self._views[index]
        target.copy_(source, non_blocking=True)


def differences(enter: Sequence[RowEnter], edits: Sequence[TableEdit], state: StateLayout) -> Pairs | None:
    """The pairs (at, value) that bring rows and tables up to a plan; each address once, its last value."""
    if not enter and not edits:
        return None
    parts: list[Pairs] = []
    for e in enter:
        tokens = np.empty((len(e.tokens), 2), np.int32)
        tokens[:, 0] = np.arange(len(e.tokens), dtype=np.int32) + e.row * state.max_len
        tokens[:, 1] = e.tokens
        first = state.numbers + e.row * step.NUM_WORDS
        numbers = np.array([*enumerate(sampling_words(e), first)], np.int32)
        parts += [tokens, numbers]
    if edits:
        entries: dict[int, int] = {}
        for edit in edits:
            at = state.tables + (edit.group * state.max_rows + edit.row) * state.max_blocks + edit.first_index
            assert edit.first_index + len(edit.block_ids) <= state.max_blocks, f"row {edit.row}: a table too long"
            entries.update(enumerate(edit.block_ids, at))
        parts.append(np.array([*entries.items()], np.int32))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def split(pairs: Pairs, at_most: int) -> list[Pairs]:
    """Pieces of at most so many pairs, in order."""
    ends = [*range(0, len(pairs), at_most), len(pairs)]
    return [pairs[first:end] for first, end in pairwise(ends)]
