"""The device tables of running rows: known tokens, block tables, sampling numbers. Changed by differences only.

    tokens   int32 [max_rows, max_model_len + 1]   prompt, then what the sampler wrote
    tables   int32 [max_rows, max blocks] a group  logical block -> physical
    numbers  int32 [max_rows, NUM_WORDS]           sampling parameters, floats as their bits

All three are views of `state`, one tensor, so that a difference anywhere is one address and one value.

A step's changes travel in its one upload and are scattered on the device, so the host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from steelyard.core.sampling import SamplingParams
from steelyard.core.step import RowEnter, RowWork, StepPlan
from steelyard.kernels.step import NUM_WORDS, REPETITION, StateLayout
from steelyard.runner.options import Limits
from steelyard.runner.staging import Int32Array, Staging, floats

LEAST_TOP_P = 1e-6
"""A share so small keeps the best token alone; nearer to zero float32 would lose it and keep none."""


@dataclass(frozen=True, slots=True)
class HostRow:
    """What the host remembers of a row: who it is, and what may be needed to plan its sampling."""

    epoch: int
    prompt_len: int
    sampling: SamplingParams


class Rows:
    """Tables and their host mirror. `host[row]` is None while nobody has the row."""

    def __init__(self, limits: Limits, num_groups: int, device: torch.device) -> None:
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self.device = device
        self.max_len = limits.max_model_len + 1
        self.max_blocks = max_blocks
        self.layout = StateLayout(limits.max_rows, self.max_len, max_blocks, num_groups, limits.block_size)
        self.state = torch.zeros(self.layout.num_words, dtype=torch.int32, device=device)
        self.tokens = self.state[: self.layout.tables].view(limits.max_rows, self.max_len)
        tables = self.state[self.layout.tables : self.layout.numbers]
        self.tables = tuple(tables.view(num_groups, limits.max_rows, max_blocks))
        self.numbers = self.state[self.layout.numbers :].view(limits.max_rows, NUM_WORDS)
        self.host: list[HostRow | None] = [None] * limits.max_rows

    def stage(self, plan: StepPlan, staging: Staging) -> None:
        """Note the plan's leave, enter and edits in the host mirror and in the upload."""
        for row in plan.leave:
            assert self.host[row] is not None, f"row {row} leaves and is empty"
            self.host[row] = None
        if plan.enter:
            self._stage_enter(plan.enter, staging)
        for group in range(len(self.tables)):
            edits = [e for e in plan.edits if e.group == group]
            if edits:
                at = [
                    np.arange(e.first_index, e.first_index + len(e.block_ids)) + e.row * self.max_blocks for e in edits
                ]
                staging.add(f"edit_at{group}", np.concatenate(at).astype(np.int32))
                staging.add(f"edit{group}", np.concatenate([np.array(e.block_ids, np.int32) for e in edits]))

    def _stage_enter(self, enter: tuple[RowEnter, ...], staging: Staging) -> None:
        at: list[Int32Array] = []
        tokens: list[Int32Array] = []
        numbers: list[int] = []
        for e in enter:
            assert self.host[e.row] is None, f"row {e.row} is entered twice"
            self.host[e.row] = HostRow(e.epoch, e.prompt_len, e.sampling)
            at.append(np.arange(len(e.tokens), dtype=np.int32) + e.row * self.max_len)
            tokens.append(np.array(e.tokens, dtype=np.int32))
            numbers += sampling_words(e)
        staging.add("enter_rows", np.array([e.row for e in enter], np.int32))
        staging.add("enter_numbers", np.array(numbers, np.int32))
        staging.add("token_at", np.concatenate(at))
        staging.add("tokens", np.concatenate(tokens))

    def apply(self, staging: Staging) -> None:
        """Scatter the uploaded changes into the tables; device work only."""
        if "tokens" in staging:
            self.tokens.view(-1).index_copy_(0, staging["token_at"].long(), staging["tokens"])
            words = staging["enter_numbers"].view(-1, NUM_WORDS)
            self.numbers.index_copy_(0, staging["enter_rows"].long(), words)
        for group, table in enumerate(self.tables):
            if f"edit{group}" in staging:
                table.view(-1).index_copy_(0, staging[f"edit_at{group}"].long(), staging[f"edit{group}"])

    def stage_drafts(self, work: Sequence[RowWork], staging: Staging) -> None:
        """Note where guesses come from and go to, in the order of `work`."""
        drafted = [w for w in work if w.num_drafts]
        if drafted:
            ends = [w.row * self.max_len + w.start + w.num_new for w in drafted]
            starts = [w.row * self.max_len + w.draft_from for w in drafted]
            to = [np.arange(end - w.num_drafts, end) for w, end in zip(drafted, ends, strict=True)]
            source = [np.arange(start, start + w.num_drafts) for w, start in zip(drafted, starts, strict=True)]
            staging.add("draft_to", np.concatenate(to).astype(np.int32))
            staging.add("draft_from", np.concatenate(source).astype(np.int32))

    def copy_drafts(self, staging: Staging) -> Tensor | None:
        """Put guesses behind the known tokens of their rows; returns them, int32, None if there are none."""
        if "draft_to" not in staging:
            return None
        flat = self.tokens.view(-1)
        drafts = flat[staging["draft_from"].long()]
        flat.index_copy_(0, staging["draft_to"].long(), drafts)
        return drafts

    def append(self, rows: Tensor, positions: Tensor, ids: Tensor) -> None:
        """Put sampled ids [S] at `positions` of `rows`: where the next step finds them."""
        self.tokens.view(-1).index_copy_(0, rows * self.max_len + positions, ids.to(torch.int32))

    def column(self, rows: Tensor, column: int) -> Tensor:
        """One sampling number of each row: float32 up to REPETITION, int32 after it."""
        values = self.numbers[rows, column]
        return values.view(torch.float32) if column <= REPETITION else values


def sampling_words(enter: RowEnter) -> list[int]:
    """A row's NUM_WORDS int32 words, in the order of kernels/step.py."""
    s = enter.sampling
    top_p = max(s.top_p, LEAST_TOP_P)
    real = (s.temperature, top_p, s.min_p, s.presence_penalty, s.frequency_penalty, s.repetition_penalty)
    seed = np.array([(s.seed or 0) % 2**64], np.uint64).view(np.int32)
    return [*floats(*real), max(s.top_k, 0), enter.prompt_len, *seed.tolist()]
