"""One token a row without sorting the vocabulary: thresholds by bisection, then the inverse CDF in id order.

Each token's weight is an integer, floor(2^32 exp((logit - best) / temperature)): integer sums do not depend on their
order, so the result does not depend on how a row is split, and the CDF is monotonic.

    row_best       grid (S, splits)   best logit and its id
    row_collect    grid (S, splits)   with top-k, top-p or min-p: the few tokens that can matter, out of the many
    row_threshold  grid (S)           the lowest kept logit and how many of its equals: bisection over the few, in
                                      registers; a row whose few do not decide it is bisected over all
    row_weight     grid (S, splits)   weight of what is kept, and how many equal the threshold
    row_pick       grid (S)           u * total -> split -> id

u = word / 2^32, word = the first of Philox-4x32-10 with the seed as key and (position, draw, 0, 0) as counter (Salmon
et al. 2011), computed by `uniforms` or by the host. Tokens rank by (logit down, id up): of equals at the threshold the
lowest ids stay.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from steelyard.kernels.triton_common import LOG2E, power_of_two
from steelyard.kernels.triton_sample_cut import load_logits, order_key, row_collect, row_threshold, token_weight

BLOCK = 2048


@triton.jit
def row_best(Logits, Best, BestId, V, stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Best logit of each share of a row and the lowest id that has it."""
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    share = tl.cdiv(tl.cdiv(V, SPLITS), BLOCK) * BLOCK
    best = -float("inf")
    where = 0
    for at in range(s * share, tl.minimum(s * share + share, V), BLOCK):
        x = load_logits(Logits, row, at + tl.arange(0, BLOCK), V, stride)
        top, offset = tl.max(x, 0, return_indices=True)
        where = tl.where(top > best, at + offset, where)
        best = tl.maximum(best, top)
    tl.store(Best + row * SPLITS + s, best)
    tl.store(BestId + row * SPLITS + s, where)


@triton.jit
def row_weight(Logits, Best, Weights, Ties, Threshold, Temperature, V, stride, SPLITS: tl.constexpr,
               BLOCK: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    """Weight above the threshold, and number of tokens at it, in each share of a row."""
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.max(tl.load(Best + row * SPLITS + tl.arange(0, SPLITS)), 0)
    per_temperature = LOG2E / tl.maximum(tl.load(Temperature + row), 1e-5)
    threshold = -2147483647
    if CUT:
        threshold = tl.load(Threshold + row)
    share = tl.cdiv(tl.cdiv(V, SPLITS), BLOCK) * BLOCK
    weight = tl.zeros([BLOCK], tl.int64)
    ties = tl.zeros([BLOCK], tl.int32)
    for at in range(s * share, tl.minimum(s * share + share, V), BLOCK):
        x = load_logits(Logits, row, at + tl.arange(0, BLOCK), V, stride)
        key = order_key(x)
        weight += tl.where(key > threshold, token_weight(x, best, per_temperature), 0)
        ties += (key == threshold).to(tl.int32)
    tl.store(Weights + row * SPLITS + s, tl.sum(weight, 0))
    tl.store(Ties + row * SPLITS + s, tl.sum(ties, 0))


@triton.jit
def row_pick(Logits, Best, BestId, Weights, Ties, Threshold, Equals, Temperature, U, Out, V, stride,
             SPLITS: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    """The id whose range of the kept weight, in id order, holds u * total; the best id if temperature is 0."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    bests = tl.load(Best + row * SPLITS + s)
    best, at_best = tl.max(bests, 0, return_indices=True)
    token = tl.load(BestId + row * SPLITS + at_best)
    temperature = tl.load(Temperature + row)
    if temperature >= 1e-5:
        per_temperature = LOG2E / temperature
        threshold = -2147483647
        equals = 0
        unit = tl.zeros([], tl.int64)
        if CUT:
            threshold = tl.load(Threshold + row)
            equals = tl.load(Equals + row)
            bits = tl.where(threshold < 0, threshold ^ 0x7FFFFFFF, threshold)
            unit = token_weight(bits.to(tl.float32, bitcast=True), best, per_temperature)
        ties = tl.load(Ties + row * SPLITS + s)
        ties_before = tl.cumsum(ties, 0) - ties
        kept_ties = tl.minimum(tl.maximum(equals - ties_before, 0), ties)
        weights = tl.load(Weights + row * SPLITS + s) + kept_ties.to(tl.int64) * unit
        end = tl.cumsum(weights, 0)
        total = tl.sum(weights, 0)
        word = (tl.load(U + row) * 4294967296.0).to(tl.uint64)
        scaled = tl.umulhi(word << 32, total.to(tl.uint64)).to(tl.int64)
        part = tl.sum((end <= scaled).to(tl.int32), 0)
        left = scaled - tl.sum(tl.where(s < part, weights, 0), 0)
        ties_seen = tl.sum(tl.where(s < part, ties, 0), 0)
        share = tl.cdiv(tl.cdiv(V, SPLITS), BLOCK) * BLOCK
        at = part * share
        stop = tl.minimum(at + share, V)
        found = False
        while (at < stop) & (not found):
            i = at + tl.arange(0, BLOCK)
            x = load_logits(Logits, row, i, V, stride)
            key = order_key(x)
            tie = ((key == threshold) & (i < V)).to(tl.int32)
            tie_rank = ties_seen + tl.cumsum(tie, 0) - tie
            kept = (key > threshold) | ((tie == 1) & (tie_rank < equals))
            w = tl.where(kept & (i < V), token_weight(x, best, per_temperature), 0)
            inside = tl.sum(w, 0)
            if inside > left:
                cdf = tl.cumsum(w, 0)
                token = at + tl.sum((cdf <= left).to(tl.int32), 0)
                found = True
            left -= inside
            ties_seen += tl.sum(tie, 0)
            at += BLOCK
    tl.store(Out + row, token.to(tl.int64))


@triton.jit
def uniform_rows(Seeds, Positions, Out, draw, n, BLOCK: tl.constexpr):
    """u of each (seed, position) and draw, float64."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    position = tl.load(Positions + i, mask=ok, other=0).to(tl.uint32)
    zero = position * 0
    word, _, _, _ = tl.philox(tl.load(Seeds + i, mask=ok, other=0), position, zero + draw.to(tl.uint32), zero, zero)
    tl.store(Out + i, word.to(tl.float64) / 4294967296.0, mask=ok)


def uniforms(seeds: Tensor, positions: Tensor, out: Tensor, draw: int = 0) -> Tensor:
    """out float64 [S] in [0, 1): Philox-4x32-10 of seeds int64 [S] (64 bits) at positions int64 [S]."""
    n = seeds.shape[0]
    uniform_rows[(-(-n // 128),)](seeds, positions, out, draw, n, BLOCK=128, num_warps=4)
    return out


@dataclass(frozen=True, slots=True)
class Cut:
    """Per-row limits [S]: top_k int32 (0: off), top_p float32 in (0, 1], min_p float32 (0: off)."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class Sampler:
    """Holds the scratch of up to max_rows rows; nothing is allocated by a call.

    splits programs share a row of logits and collect few tokens each; both are powers of two.
    """

    def __init__(self, max_rows: int, device: torch.device, splits: int = 32, few: int = 256) -> None:
        self._splits, self._few = splits, few

        def scratch(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.empty(max_rows, *width, dtype=dtype, device=device)

        self._best, self._best_id = scratch(torch.float32, splits), scratch(torch.int32, splits)
        self._weights, self._ties = scratch(torch.int64, splits), scratch(torch.int32, splits)
        self._candidates, self._counts = scratch(torch.float32, splits, few), scratch(torch.int32, splits)
        self._limit = scratch(torch.int32, splits)
        self._threshold, self._equals = scratch(torch.int32), scratch(torch.int32)

    def __call__(self, logits: Tensor, u: Tensor, temperature: Tensor, cut: Cut | None, out: Tensor) -> Tensor:
        """out int64 [S] from logits [S, V], penalties, bias and mask already applied.

        u float64 [S] in [0, 1), a multiple of 2^-32; temperature float32 [S], 0: greedy; cut None: no row has one.
        """
        num_rows, vocab_size = logits.shape
        assert num_rows <= self._best.shape[0] and logits.stride(1) == 1
        splits, each = self._splits, (num_rows, self._splits)
        size = (vocab_size, logits.stride(0))
        tiles = {"SPLITS": splits, "BLOCK": BLOCK}
        row_best[each](logits, self._best, self._best_id, *size, **tiles, num_warps=4)
        if cut is not None:
            row_collect[each](
                logits, self._best, self._candidates, self._counts, self._limit, self._weights, temperature,
                cut.min_p, *size, SPLITS=splits, SHARE=power_of_two(-(-vocab_size // splits)), FEW=self._few,
                num_warps=8,
            )  # fmt: skip
            for everything in (False, True):
                row_threshold[(num_rows,)](
                    logits, self._best, self._candidates, self._counts, self._limit, self._weights, self._threshold,
                    self._equals, temperature, cut.top_k, cut.top_p, cut.min_p, *size, SPLITS=splits, BLOCK=4 * BLOCK,
                    FEW=self._few, ALL=everything, num_warps=16,
                )  # fmt: skip
        row_weight[each](
            logits, self._best, self._weights, self._ties, self._threshold, temperature, *size, **tiles,
            CUT=cut is not None, num_warps=4,
        )  # fmt: skip
        row_pick[(num_rows,)](
            logits, self._best, self._best_id, self._weights, self._ties, self._threshold, self._equals, temperature,
            u, out, *size, **tiles, CUT=cut is not None, num_warps=4,
        )  # fmt: skip
        return out
