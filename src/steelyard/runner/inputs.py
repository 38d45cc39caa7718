"""From a plan's work to what the model reads: positions, tokens, slots, tables. Expanded on the device.

host    rows, starts, counts, q_start   R numbers each, staged      decode rows first
device  positions, token ids, slots     T numbers each, computed    token ids from the device's own table
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from steelyard.core.step import RowWork
from steelyard.kernels.attention import Batch, KvLayer
from steelyard.layers.batch import StepBatch
from steelyard.runner.rows import Rows
from steelyard.runner.staging import Int32Array, Staging


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each row's tokens lie in a step: `work` in its order, `q_start` [R + 1] on the host."""

    work: tuple[RowWork, ...]
    q_start: Int32Array
    num_decode: int
    max_q: int
    max_ctx: int

    @property
    def num_tokens(self) -> int:
        return int(self.q_start[-1])

    def last_token(self, index: int) -> int:
        """Packed index of the last new token of work item `index`."""
        return int(self.q_start[index + 1]) - 1


def lay_out(work: tuple[RowWork, ...], staging: Staging) -> Layout:
    """Order the work, decodes (one new token) first, and stage its numbers."""
    ordered = tuple(sorted(work, key=lambda w: w.num_new > 1))
    counts = np.array([w.num_new for w in ordered], np.int32)
    starts = np.array([w.start for w in ordered], np.int32)
    q_start = np.zeros(len(ordered) + 1, np.int32)
    np.cumsum(counts, out=q_start[1:])
    staging.add("work_rows", np.array([w.row for w in ordered], np.int32))
    staging.add("work_starts", starts)
    staging.add("work_counts", counts)
    staging.add("work_q_start", q_start)
    num_decode = int((counts == 1).sum())
    return Layout(ordered, q_start, num_decode, int(counts.max(initial=0)), int((starts + counts).max(initial=0)))


def expand(layout: Layout, staging: Staging, rows: Rows, kv: tuple[KvLayer, ...]) -> StepBatch:
    """The step's tensors on the device; nothing is read back."""
    device, num_tokens = rows.device, layout.num_tokens
    row, start = staging["work_rows"].long(), staging["work_starts"].long()
    counts, q_start = staging["work_counts"], staging["work_q_start"]
    if layout.max_q == 1 and layout.num_decode == row.numel():
        positions, token_row = start, row
    else:
        at = torch.arange(row.numel(), device=device)
        owner = torch.repeat_interleave(at, counts.long(), output_size=num_tokens)
        positions = torch.arange(num_tokens, device=device) - (q_start[:-1].long() - start)[owner]
        token_row = row[owner]
    block_size = kv[0].block_size
    block, offset = positions // block_size, positions % block_size
    slots = tuple(table[token_row, block].long() * block_size + offset for table in rows.tables)
    num_blocks = -(-layout.max_ctx // block_size)
    batch = Batch(
        positions=positions,
        slots=slots,
        q_start=q_start,
        ctx_len=staging["work_starts"] + counts,
        tables=tuple(table[row, :num_blocks] for table in rows.tables),
        num_tokens=num_tokens,
        num_decode=layout.num_decode,
        max_q=layout.max_q,
        max_ctx=layout.max_ctx,
    )
    return StepBatch(rows.tokens[token_row, positions].long(), batch, kv)
