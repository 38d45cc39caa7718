"""The operators of step.py as Triton kernels: a step's tables made on the device, nothing read back.

    patch_rows     pairs (at, value) of the frame into the state
    expand_rows    programs for blocks of tokens, then one program a row
    sample_inputs  numbers, uniforms and places of the rows to sample
    finish_rows    one program a sampled row

Grids are a bucket's; counts are read from the frame. None of them starts early, and the kernel behind `expand_rows`
must not either (see triton_common).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steelyard.kernels import step
from steelyard.kernels.step import FrameLayout, Inputs, Sampling, StateLayout
from steelyard.kernels.triton_common import power_of_two
from steelyard.kernels.triton_sample import Cut, Sampler

TOKENS = 128
ENTRIES = 128
PATCH_PROGRAMS = 32
NUM_ROWS = tl.constexpr(step.NUM_ROWS)
NUM_TOKENS = tl.constexpr(step.NUM_TOKENS)
NUM_SAMPLED = tl.constexpr(step.NUM_SAMPLED)
NUM_PATCHES = tl.constexpr(step.NUM_PATCHES)
NUM_WORDS = tl.constexpr(step.NUM_WORDS)
TEMPERATURE = tl.constexpr(step.TEMPERATURE)
TOP_P = tl.constexpr(step.TOP_P)
MIN_P = tl.constexpr(step.MIN_P)
TOP_K = tl.constexpr(step.TOP_K)
SEED_LOW = tl.constexpr(step.SEED_LOW)
SEED_HIGH = tl.constexpr(step.SEED_HIGH)


@triton.jit
def patch_rows(Frame, State, PATCHES: tl.constexpr, BLOCK: tl.constexpr):
    """Any grid: programs share the pairs."""
    count = tl.load(Frame + NUM_PATCHES)
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        ok = i < count
        pair = Frame + PATCHES + 2 * i
        at = tl.load(pair, mask=ok, other=0)
        tl.store(State + at, tl.load(pair + 1, mask=ok, other=0), mask=ok)


@triton.jit
def _expand_tokens(Frame, State, Positions, Ids, Slots, slot_stride, first, num_tokens, ROWS: tl.constexpr,
                   STARTS: tl.constexpr, Q_START: tl.constexpr, R: tl.constexpr, LEN: tl.constexpr,
                   TABLES: tl.constexpr, BLOCKS: tl.constexpr, BS: tl.constexpr, G: tl.constexpr,
                   BLOCK: tl.constexpr, LOG: tl.constexpr, T):  # fmt: skip
    """Tokens first .. first + BLOCK: the row each belongs to by bisection over q_start."""
    t = first + tl.arange(0, BLOCK)
    real = t < num_tokens
    low = tl.zeros([BLOCK], tl.int32)
    high = low + tl.load(Frame + NUM_ROWS)
    for _ in tl.static_range(LOG):
        middle = (low + high) // 2
        below = tl.load(Frame + Q_START + middle, mask=real, other=0) <= t
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    row = tl.load(Frame + ROWS + low, mask=real, other=0)
    begin = tl.load(Frame + STARTS + low, mask=real, other=0) - tl.load(Frame + Q_START + low, mask=real, other=0)
    position = tl.where(real, begin + t, 0)
    inside = t < T
    tl.store(Positions + t, position.to(tl.int64), mask=inside)
    ids = tl.load(State + row.to(tl.int64) * LEN + position, mask=real, other=0)
    tl.store(Ids + t, ids.to(tl.int64), mask=inside)
    for g in tl.static_range(G):
        at = TABLES + (g * R + row).to(tl.int64) * BLOCKS + position // BS
        slot = tl.load(State + at, mask=real, other=0).to(tl.int64) * BS + position % BS
        tl.store(Slots + g * slot_stride + t, tl.where(real, slot, -1), mask=inside)


@triton.jit(do_not_specialize=["num_token_programs", "bucket_rows", "slot_stride", "T"])
def expand_rows(Frame, State, Positions, Ids, Slots, QStart, Ctx, TablesOut, num_token_programs, bucket_rows,
                slot_stride, T, table_stride, ROWS: tl.constexpr, STARTS: tl.constexpr, Q_START: tl.constexpr,
                R: tl.constexpr, LEN: tl.constexpr, TABLES: tl.constexpr, BLOCKS: tl.constexpr, BS: tl.constexpr,
                G: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr):  # fmt: skip
    """Grid (token programs + bucket rows). Tables are copied as far as the row's context reaches."""
    pid = tl.program_id(0)
    num_rows, num_tokens = tl.load(Frame + NUM_ROWS), tl.load(Frame + NUM_TOKENS)
    if pid < num_token_programs:
        _expand_tokens(Frame, State, Positions, Ids, Slots, slot_stride, pid * BLOCK, num_tokens, ROWS, STARTS,
                       Q_START, R, LEN, TABLES, BLOCKS, BS, G, BLOCK, LOG, T)  # fmt: skip
    else:
        r = pid - num_token_programs
        begin, ctx = num_tokens, 0
        if r < num_rows:
            begin = tl.load(Frame + Q_START + r)
            ctx = tl.load(Frame + STARTS + r) + tl.load(Frame + Q_START + r + 1) - begin
            row = tl.load(Frame + ROWS + r).to(tl.int64)
            for g in tl.static_range(G):
                source = State + TABLES + (g * R + row) * BLOCKS
                target = TablesOut + g * table_stride + r.to(tl.int64) * BLOCKS
                num_blocks = (ctx + BS - 1) // BS
                for first in range(0, num_blocks, BLOCK):
                    i = first + tl.arange(0, BLOCK)
                    tl.store(target + i, tl.load(source + i, mask=i < num_blocks, other=0), mask=i < num_blocks)
        tl.store(QStart + r, begin)
        tl.store(Ctx + r, ctx)
        if r == bucket_rows - 1:
            tl.store(QStart + bucket_rows, num_tokens)


@triton.jit
def _real(words, ok, other: tl.constexpr):
    return tl.where(ok, words.to(tl.float32, bitcast=True), other)


@triton.jit(do_not_specialize=["first", "size"])
def sample_inputs(Frame, State, Last, Target, Temperature, TopK, TopP, MinP, U, first, size, ROWS: tl.constexpr,
                  STARTS: tl.constexpr, Q_START: tl.constexpr, SAMPLED: tl.constexpr, LEN: tl.constexpr,
                  NUMBERS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Grid (ceil(size / BLOCK)): entries first .. first + size of the frame's list; padding is greedy, target -1."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    ok = inside & (first + i < tl.load(Frame + NUM_SAMPLED))
    at = tl.load(Frame + SAMPLED + first + i, mask=ok, other=0)
    row = tl.load(Frame + ROWS + at, mask=ok, other=0).to(tl.int64)
    end = tl.load(Frame + Q_START + at + 1, mask=ok, other=1)
    position = tl.load(Frame + STARTS + at, mask=ok, other=0) + end - tl.load(Frame + Q_START + at, mask=ok, other=0)
    numbers = State + NUMBERS + row * NUM_WORDS
    tl.store(Last + i, tl.where(ok, end - 1, 0).to(tl.int64), mask=inside)
    tl.store(Target + i, tl.where(ok, row * LEN + position, -1), mask=inside)
    temperature = tl.load(numbers + TEMPERATURE, mask=ok, other=0)
    tl.store(Temperature + i, _real(temperature, ok, 0.0), mask=inside)
    tl.store(TopP + i, _real(tl.load(numbers + TOP_P, mask=ok, other=0), ok, 1.0), mask=inside)
    tl.store(MinP + i, _real(tl.load(numbers + MIN_P, mask=ok, other=0), ok, 0.0), mask=inside)
    tl.store(TopK + i, tl.load(numbers + TOP_K, mask=ok, other=0), mask=inside)
    low = tl.load(numbers + SEED_LOW, mask=ok, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    seed = low | (tl.load(numbers + SEED_HIGH, mask=ok, other=0).to(tl.int64) << 32)
    counter = position.to(tl.uint32)
    zero = counter * 0
    word, _, _, _ = tl.philox(seed, counter, zero, zero, zero)
    tl.store(U + i, tl.where(ok, word.to(tl.float64) / 4294967296.0, 0.0), mask=inside)


@triton.jit
def finish_rows(State, Hidden, Logits, Last, Target, Ids, Result, hidden_stride, logits_stride, H: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Grid (S). A row whose hidden state or chosen logit is not finite gets result -1 and token 0."""
    i = tl.program_id(0).to(tl.int64)
    target, token = tl.load(Target + i), tl.load(Ids + i)
    h = tl.arange(0, BLOCK)
    x = tl.load(Hidden + tl.load(Last + i) * hidden_stride + h, mask=h < H, other=0.0).to(tl.float32)
    own = tl.load(Logits + i * logits_stride + token).to(tl.float32)
    bad = tl.sum((~(tl.abs(x) <= 3.4e38)).to(tl.int32), 0)
    ok = (bad == 0) & (tl.abs(own) <= 3.4e38)
    tl.store(Result + i, tl.where(ok, token, -1).to(tl.int32))
    tl.store(State + target, tl.where(ok, token, 0).to(tl.int32), mask=target >= 0)


class TritonStep:
    """StepOperators as kernels on the current stream; at most max_sampled rows are sampled at once."""

    def __init__(self, frame: FrameLayout, state: StateLayout, max_sampled: int, device: torch.device) -> None:
        assert state.num_words < 2**31, "an address in the state is int32"
        self.frame = frame
        self.state = state
        self._sampler = Sampler(max_sampled, device)

    def patch_state(self, frame: Tensor, state: Tensor) -> None:
        """See StepOperators."""
        patch_rows[(PATCH_PROGRAMS,)](frame, state, PATCHES=self.frame.patches, BLOCK=512, num_warps=4)

    def expand(self, frame: Tensor, state: Tensor, out: Inputs) -> None:
        """See StepOperators."""
        f, s = self.frame, self.state
        num_tokens, num_rows = out.positions.shape[0], out.ctx_len.shape[0]
        token_programs = -(-num_tokens // TOKENS)
        expand_rows[(token_programs + num_rows,)](
            frame, state, out.positions, out.token_ids, out.slots, out.q_start, out.ctx_len, out.tables,
            token_programs, num_rows, out.slots.stride(0), num_tokens, out.tables.stride(0), ROWS=f.rows,
            STARTS=f.starts, Q_START=f.q_start, R=s.max_rows, LEN=s.max_len, TABLES=s.tables, BLOCKS=s.max_blocks,
            BS=s.block_size, G=s.num_groups, BLOCK=TOKENS, LOG=s.max_rows.bit_length() + 1, num_warps=4,
        )  # fmt: skip

    def sampling(self, frame: Tensor, state: Tensor, out: Sampling, first: int = 0) -> None:
        """See StepOperators."""
        f, s, size = self.frame, self.state, out.last.shape[0]
        sample_inputs[(-(-size // ENTRIES),)](
            frame, state, out.last, out.target, out.temperature, out.top_k, out.top_p, out.min_p, out.u, first, size,
            ROWS=f.rows, STARTS=f.starts, Q_START=f.q_start, SAMPLED=f.sampled, LEN=s.max_len, NUMBERS=s.numbers,
            BLOCK=ENTRIES, num_warps=4,
        )  # fmt: skip

    def sample(self, logits: Tensor, rows: Sampling, cut: bool) -> None:
        """See StepOperators."""
        limits = Cut(rows.top_k, rows.top_p, rows.min_p) if cut else None
        self._sampler(logits, rows.u, rows.temperature, limits, rows.ids)

    def finish(self, state: Tensor, hidden: Tensor, logits: Tensor, rows: Sampling) -> None:
        """See StepOperators."""
        finish_rows[(rows.last.shape[0],)](
            state, hidden, logits, rows.last, rows.target, rows.ids, rows.result, hidden.stride(0), logits.stride(0),
            H=hidden.shape[1], BLOCK=power_of_two(hidden.shape[1]), num_warps=4,
        )  # fmt: skip
