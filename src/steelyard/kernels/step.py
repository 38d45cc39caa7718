"""What surrounds a forward on the device: differences into the rows' state, a step's inputs, its results. Plain torch.

    frame    one step as the host wrote it, int32, uploaded in one copy
    state    known tokens, block tables and sampling numbers of all rows, one int32 tensor

    patch_state     state[at] = value for every pair of the frame
    expand          positions, token ids, slots, row lengths, tables: all that attention and layers read
    sampling        of each row to sample: its last token, numbers, uniform, and where its new token goes
    finish          new tokens into the state; a result for the host, -1 where the row's numbers are not finite

Shapes are a bucket's; how much of it is real stands in the frame, so a captured step serves any step of its bucket.
These are the twins of triton_step.py: the same tables, value for value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from steelyard.kernels.sampling import Controls, choose

HEADER_WORDS = 8
NUM_ROWS, NUM_TOKENS, NUM_SAMPLED, NUM_PATCHES = range(4)

# Columns of a row's sampling numbers: six floats as their bits, then integers.
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, TOP_K, PROMPT_LEN, SEED_LOW, SEED_HIGH = range(10)
NUM_WORDS = 10


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Word offsets in a frame.

    header | rows [R] | starts [R] | q_start [R + 1] | sampled [R] | patches [P, 2] (at, value)

    R is max_rows, P max_patches. `sampled` are indexes into rows; what lies behind the counts of the header is old.
    """

    max_rows: int
    max_patches: int

    @property
    def rows(self) -> int:
        return HEADER_WORDS

    @property
    def starts(self) -> int:
        return self.rows + self.max_rows

    @property
    def q_start(self) -> int:
        return self.starts + self.max_rows

    @property
    def sampled(self) -> int:
        return self.q_start + self.max_rows + 1

    @property
    def patches(self) -> int:
        return (self.sampled + self.max_rows + 3) // 4 * 4

    @property
    def num_words(self) -> int:
        return self.patches + 2 * self.max_patches


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Word offsets in the state: tokens [R, max_len], tables [G, R, max_blocks], numbers [R, NUM_WORDS]."""

    max_rows: int
    max_len: int
    max_blocks: int
    num_groups: int
    block_size: int

    @property
    def tables(self) -> int:
        return self.max_rows * self.max_len

    @property
    def numbers(self) -> int:
        return self.tables + self.num_groups * self.max_rows * self.max_blocks

    @property
    def num_words(self) -> int:
        return self.numbers + self.max_rows * NUM_WORDS


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where `expand` writes; views of fixed tensors, cut to a bucket of T tokens and R rows.

    positions, token_ids int64 [T]; slots int64 [G, T]; q_start int32 [R + 1]; ctx_len int32 [R];
    tables int32 [G, R, max_blocks]: entries behind a row's context are old
    """

    positions: Tensor
    token_ids: Tensor
    slots: Tensor
    q_start: Tensor
    ctx_len: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """Where `sampling` writes, [S] each, and what `finish` reads and writes.

    last      int64: packed index of the row's last new token
    target    int64: where the new token goes in the state; -1: padding
    u         float64 in [0, 1)
    ids       int64: what was sampled
    result    int32: ids for the host, -1 for a row that failed
    """

    last: Tensor
    target: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    u: Tensor
    ids: Tensor
    result: Tensor

    def part(self, first: int, end: int) -> Sampling:
        """Views of entries [first, end)."""
        names = self.__dataclass_fields__
        return Sampling(*(getattr(self, name)[first:end] for name in names))


class StepOperators(Protocol):
    """The operators above, for one frame and one state. Safe to capture."""

    frame: FrameLayout
    state: StateLayout

    def patch_state(self, frame: Tensor, state: Tensor) -> None:
        """Apply the frame's pairs; no address is in two of them."""
        ...

    def expand(self, frame: Tensor, state: Tensor, out: Inputs) -> None:
        """Fill `out`; tokens behind the real ones get slot -1, rows behind them no tokens."""
        ...

    def sampling(self, frame: Tensor, state: Tensor, out: Sampling, first: int = 0) -> None:
        """Fill `out` for sampled entries from `first` on; padding is greedy and has target -1."""
        ...

    def sample(self, logits: Tensor, rows: Sampling, cut: bool) -> None:
        """rows.ids from logits [S, V]; without `cut` no row has top-k, top-p or min-p."""
        ...

    def finish(self, state: Tensor, hidden: Tensor, logits: Tensor, rows: Sampling) -> None:
        """Results, and tokens into the state; hidden [T, H] of the step, logits [S, V] of the rows."""
        ...


class TorchStep:
    """StepOperators in plain torch. They synchronise: for tests of buckets and buffers without a GPU."""

    def __init__(self, frame: FrameLayout, state: StateLayout) -> None:
        self.frame = frame
        self.state = state

    def patch_state(self, frame: Tensor, state: Tensor) -> None:
        """See StepOperators."""
        count, first = int(frame[NUM_PATCHES]), self.frame.patches
        pairs = frame[first : first + 2 * count].view(-1, 2)
        state.index_copy_(0, pairs[:, 0].long(), pairs[:, 1])

    def expand(self, frame: Tensor, state: Tensor, out: Inputs) -> None:
        """See StepOperators."""
        f, s = self.frame, self.state
        num_rows, num_tokens = int(frame[NUM_ROWS]), int(frame[NUM_TOKENS])
        rows = frame[f.rows : f.rows + num_rows].long()
        starts = frame[f.starts : f.starts + num_rows].long()
        q_start = frame[f.q_start : f.q_start + num_rows + 1]
        counts = (q_start[1:] - q_start[:-1]).long()
        out.q_start.fill_(num_tokens)
        out.q_start[: num_rows + 1] = q_start
        out.ctx_len.zero_()
        out.ctx_len[:num_rows] = (starts + counts).int()
        owner = torch.repeat_interleave(torch.arange(num_rows, device=frame.device), counts)
        positions = torch.arange(num_tokens, device=frame.device) - (q_start[:-1].long() - starts)[owner]
        out.positions.zero_()
        out.positions[:num_tokens] = positions
        tokens = state[: s.tables].view(s.max_rows, s.max_len)
        out.token_ids.zero_()
        out.token_ids[:num_tokens] = tokens[rows[owner], positions].long()
        tables = state[s.tables : s.numbers].view(s.num_groups, s.max_rows, s.max_blocks)
        out.slots.fill_(-1)
        for group, table in enumerate(tables):
            out.tables[group, :num_rows] = table[rows]
            block = table[rows[owner], positions // s.block_size].long()
            out.slots[group, :num_tokens] = block * s.block_size + positions % s.block_size

    def sampling(self, frame: Tensor, state: Tensor, out: Sampling, first: int = 0) -> None:
        """See StepOperators."""
        f, s = self.frame, self.state
        count = max(min(int(frame[NUM_SAMPLED]) - first, out.last.shape[0]), 0)
        at = frame[f.sampled + first : f.sampled + first + count].long()
        row, start = frame[f.rows + at].long(), frame[f.starts + at].long()
        end = frame[f.q_start + at + 1].long()
        position = start + end - frame[f.q_start + at].long()
        numbers = state[s.numbers :].view(s.max_rows, NUM_WORDS)[row]
        for values, padding in ((out.last, 0), (out.target, -1), (out.temperature, 0), (out.top_k, 0), (out.u, 0)):
            values.fill_(padding)
        out.top_p.fill_(1.0)
        out.min_p.fill_(0.0)
        out.last[:count] = end - 1
        out.target[:count] = row * s.max_len + position
        real = numbers.view(torch.float32)
        out.temperature[:count], out.top_p[:count] = real[:, TEMPERATURE], real[:, TOP_P]
        out.min_p[:count], out.top_k[:count] = real[:, MIN_P], numbers[:, TOP_K]
        seeds = (numbers[:, SEED_HIGH].long() << 32) | (numbers[:, SEED_LOW].long() & 0xFFFFFFFF)
        out.u[:count] = uniform(seeds, position)

    def sample(self, logits: Tensor, rows: Sampling, cut: bool) -> None:
        """See StepOperators."""
        best = logits.argmax(dim=-1)
        temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
        limits = (rows.min_p, rows.top_k, rows.top_p) if cut else (None, None, None)
        drawn = choose(logits.float(), rows.u, Controls(temperature, *limits))
        rows.ids.copy_(torch.where(rows.temperature > 0, drawn, best))

    def finish(self, state: Tensor, hidden: Tensor, logits: Tensor, rows: Sampling) -> None:
        """See StepOperators."""
        own = logits.gather(1, rows.ids[:, None])[:, 0]
        ok = own.isfinite() & hidden[rows.last].isfinite().all(dim=-1)
        rows.result.copy_(torch.where(ok, rows.ids, -1))
        real = rows.target >= 0
        state.index_copy_(0, rows.target[real], torch.where(ok, rows.ids, 0)[real].to(torch.int32))


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 [S] in [0, 1): the first word of Philox-4x32-10 (Salmon et al., 2011), draw 0."""
    low = 0xFFFFFFFF
    k0, k1 = seeds & low, (seeds >> 32) & low
    c0, c1 = positions & low, torch.zeros_like(positions)
    c2, c3 = torch.zeros_like(positions), torch.zeros_like(positions)
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0.double() / 2**32


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of factor * x, both below 2^32, in int64 that must not overflow."""
    low, high = x & 0xFFFF, x >> 16
    first = factor * low
    second = factor * high + (first >> 16)
    return second >> 16, ((second & 0xFFFF) << 16) | (first & 0xFFFF)
