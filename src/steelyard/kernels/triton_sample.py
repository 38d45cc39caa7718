"""One token a row without sorting the vocabulary: thresholds by bisection, then the inverse CDF in id order.

Each token's weight is an integer, floor(2^32 exp((logit - best) / temperature)): integer sums do not depend on their
order, so the result does not depend on how a row is split, and the CDF is monotonic.

    row_best       grid (S, splits)   best logit and its id                    greedy rows are done here
    row_threshold  grid (S)           only with top-k, top-p or min-p: the lowest kept logit, and how many of its equals
    row_weight     grid (S, splits)   weight of what is kept, and how many equal the threshold
    row_pick       grid (S)           u * total -> split -> id

u = word / 2^32, word = the first of Philox-4x32-10 with the seed as key and (position, draw, 0, 0) as counter (Salmon
et al. 2011). Tokens rank by (logit down, id up): of equals at the threshold the lowest ids stay.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
GREEDY_BELOW = 1e-5


@triton.jit
def _key(x):
    """int32 that orders as float32 x does."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weight(x, best, per_temperature):
    """floor(2^32 exp((x - best) / temperature)) as int64; 0 for -inf."""
    return (tl.math.exp2((x - best) * per_temperature) * 4294967296.0).to(tl.int64)


@triton.jit
def _logits(Logits, row, i, V, stride):
    x = tl.load(Logits + row * stride + i, mask=i < V, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, -float("inf"))


@triton.jit
def row_best(Logits, Best, BestId, V, stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Best logit of each share of a row and the lowest id that has it."""
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    share = tl.cdiv(tl.cdiv(V, SPLITS), BLOCK) * BLOCK
    best = -float("inf")
    where = 0
    for at in range(s * share, tl.minimum(s * share + share, V), BLOCK):
        x = _logits(Logits, row, at + tl.arange(0, BLOCK), V, stride)
        top, offset = tl.max(x, 0, return_indices=True)
        where = tl.where(top > best, at + offset, where)
        best = tl.maximum(best, top)
    tl.store(Best + row * SPLITS + s, best)
    tl.store(BestId + row * SPLITS + s, where)


@triton.jit
def _above(Logits, row, pivot, best, per_temperature, V, stride, BLOCK: tl.constexpr):
    """(count, weight) of the row's tokens whose key is at least `pivot`."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.int64)
    for at in range(0, V, BLOCK):
        x = _logits(Logits, row, at + tl.arange(0, BLOCK), V, stride)
        is_above = (_key(x) >= pivot) & (x > -float("inf"))
        count += is_above.to(tl.int32)
        weight += tl.where(is_above, _weight(x, best, per_temperature), 0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _lowest_kept(Logits, row, low, high, max_count, max_weight, best, per_temperature, V, stride,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Largest key in [low, high] whose tokens from it upwards reach max_count or max_weight; low if none does."""
    while low < high:
        middle = low + ((high.to(tl.int64) - low.to(tl.int64) + 1) // 2).to(tl.int32)
        count, weight = _above(Logits, row, middle, best, per_temperature, V, stride, BLOCK)
        if (count >= max_count) | (weight >= max_weight):
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def row_threshold(Logits, Best, Threshold, Equals, Temperature, TopK, TopP, MinP, V, stride, SPLITS: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Lowest kept key and how many tokens that equal it are kept. min-p first, of the rest top-k, of those top-p."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.max(tl.load(Best + row * SPLITS + tl.arange(0, SPLITS)), 0)
    temperature = tl.load(Temperature + row)
    per_temperature = 1.4426950408889634 / tl.maximum(temperature, 1e-5)
    min_p, top_k, top_p = tl.load(MinP + row), tl.load(TopK + row), tl.load(TopP + row)
    floor = -3.0e38
    if min_p > 0:
        floor = best + tl.math.log2(min_p) / per_temperature
    low = _key(floor)
    high = tl.maximum(_key(best), low)
    everything = 0x7FFFFFFFFFFFFFFF
    equals = 0x7FFFFFFF
    plain = (temperature < 1e-5) | ((top_k <= 0) & (top_p >= 1.0))
    if not plain:
        limit = tl.where(top_k > 0, top_k, 0x7FFFFFFF)
        if top_k > 0:
            low = _lowest_kept(Logits, row, low, high, limit, everything, best, per_temperature, V, stride, BLOCK)
        above, above_weight = _above(Logits, row, low + 1, best, per_temperature, V, stride, BLOCK)
        count, weight = _above(Logits, row, low, best, per_temperature, V, stride, BLOCK)
        equals = tl.minimum(count, limit) - above
        unit = (weight - above_weight) // tl.maximum(count - above, 1)
        total = above_weight + equals * unit
        if top_p < 1.0:
            wanted = tl.maximum((total.to(tl.float64) * top_p).to(tl.int64), 1)
            kept_low = _lowest_kept(Logits, row, low, high, 0x7FFFFFFF, wanted, best, per_temperature, V, stride,
                                    BLOCK)  # fmt: skip
            above, above_weight = _above(Logits, row, kept_low + 1, best, per_temperature, V, stride, BLOCK)
            count, weight = _above(Logits, row, kept_low, best, per_temperature, V, stride, BLOCK)
            unit = tl.maximum((weight - above_weight) // tl.maximum(count - above, 1), 1)
            needed = ((wanted - above_weight + unit - 1) // unit).to(tl.int32)
            same = kept_low == low
            equals = tl.maximum(tl.minimum(needed, tl.where(same, equals, count - above)), 1)
            low = kept_low
    tl.store(Threshold + row, low)
    tl.store(Equals + row, equals)


@triton.jit
def row_weight(Logits, Best, Weights, Ties, Threshold, Temperature, V, stride, SPLITS: tl.constexpr,
               BLOCK: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    """Weight above the threshold, and number of tokens at it, in each share of a row."""
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.max(tl.load(Best + row * SPLITS + tl.arange(0, SPLITS)), 0)
    per_temperature = 1.4426950408889634 / tl.maximum(tl.load(Temperature + row), 1e-5)
    threshold = -2147483647
    if CUT:
        threshold = tl.load(Threshold + row)
    share = tl.cdiv(tl.cdiv(V, SPLITS), BLOCK) * BLOCK
    weight = tl.zeros([BLOCK], tl.int64)
    ties = tl.zeros([BLOCK], tl.int32)
    for at in range(s * share, tl.minimum(s * share + share, V), BLOCK):
        x = _logits(Logits, row, at + tl.arange(0, BLOCK), V, stride)
        key = _key(x)
        weight += tl.where(key > threshold, _weight(x, best, per_temperature), 0)
        ties += (key == threshold).to(tl.int32)
    tl.store(Weights + row * SPLITS + s, tl.sum(weight, 0))
    tl.store(Ties + row * SPLITS + s, tl.sum(ties, 0))


@triton.jit
def row_pick(Logits, Best, BestId, Weights, Ties, Threshold, Equals, Temperature, Seeds, Positions, Draws, Out, V,
             stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    """The id whose range of the kept weight, in id order, holds u * total; the best id if temperature is 0."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    bests = tl.load(Best + row * SPLITS + s)
    best, at_best = tl.max(bests, 0, return_indices=True)
    token = tl.load(BestId + row * SPLITS + at_best)
    temperature = tl.load(Temperature + row)
    if temperature >= 1e-5:
        per_temperature = 1.4426950408889634 / temperature
        threshold = -2147483647
        equals = 0
        unit = tl.zeros([], tl.int64)
        if CUT:
            threshold = tl.load(Threshold + row)
            equals = tl.load(Equals + row)
            bits = tl.where(threshold < 0, threshold ^ 0x7FFFFFFF, threshold)
            unit = _weight(bits.to(tl.float32, bitcast=True), best, per_temperature)
        ties = tl.load(Ties + row * SPLITS + s)
        ties_before = tl.cumsum(ties, 0) - ties
        kept_ties = tl.minimum(tl.maximum(equals - ties_before, 0), ties)
        weights = tl.load(Weights + row * SPLITS + s) + kept_ties.to(tl.int64) * unit
        end = tl.cumsum(weights, 0)
        total = tl.sum(weights, 0)
        zero = tl.zeros([1], tl.uint32)
        word, _, _, _ = tl.philox(tl.load(Seeds + row), zero + tl.load(Positions + row).to(tl.uint32),
                                  zero + tl.load(Draws + row).to(tl.uint32), zero, zero)  # fmt: skip
        scaled = tl.umulhi(tl.sum(word.to(tl.uint64), 0) << 32, total.to(tl.uint64)).to(tl.int64)
        part = tl.sum((end <= scaled).to(tl.int32), 0)
        left = scaled - tl.sum(tl.where(s < part, weights, 0), 0)
        ties_seen = tl.sum(tl.where(s < part, ties, 0), 0)
        share = tl.cdiv(tl.cdiv(V, SPLITS), BLOCK) * BLOCK
        at = part * share
        stop = tl.minimum(at + share, V)
        found = False
        while (at < stop) & (not found):
            i = at + tl.arange(0, BLOCK)
            x = _logits(Logits, row, i, V, stride)
            key = _key(x)
            tie = ((key == threshold) & (i < V)).to(tl.int32)
            tie_rank = ties_seen + tl.cumsum(tie, 0) - tie
            kept = (key > threshold) | ((tie == 1) & (tie_rank < equals))
            w = tl.where(kept & (i < V), _weight(x, best, per_temperature), 0)
            inside = tl.sum(w, 0)
            if inside > left:
                cdf = tl.cumsum(w, 0)
                token = at + tl.sum((cdf <= left).to(tl.int32), 0)
                found = True
            left -= inside
            ties_seen += tl.sum(tie, 0)
            at += BLOCK
    tl.store(Out + row, token.to(tl.int64))


@dataclass(frozen=True, slots=True)
class Draw:
    """Per-row numbers [S]: temperature float32 (0: greedy), seeds int64, positions int64, draws int32."""

    temperature: Tensor
    seeds: Tensor
    positions: Tensor
    draws: Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Per-row limits [S]: top_k int32 (0: off), top_p float32 in (0, 1], min_p float32 (0: off)."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class Sampler:
    """Holds the scratch of up to max_rows rows; `splits` (a power of two) programs share a row of logits."""

    def __init__(self, max_rows: int, device: torch.device, splits: int = 32) -> None:
        self._splits = splits
        self._best = torch.empty(max_rows, splits, dtype=torch.float32, device=device)
        self._best_id = torch.empty(max_rows, splits, dtype=torch.int32, device=device)
        self._weights = torch.empty(max_rows, splits, dtype=torch.int64, device=device)
        self._ties = torch.empty(max_rows, splits, dtype=torch.int32, device=device)
        self._threshold = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._equals = torch.empty(max_rows, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, draw: Draw | None, cut: Cut | None, out: Tensor) -> Tensor:
        """out int64 [S] from logits [S, V], penalties, bias and mask already applied. draw None: all rows greedy."""
        num_rows, vocab_size = logits.shape
        assert num_rows <= self._best.shape[0] and logits.stride(1) == 1
        size = (vocab_size, logits.stride(0))
        row_best[(num_rows, self._splits)](
            logits, self._best, self._best_id, *size, SPLITS=self._splits, BLOCK=BLOCK, num_warps=4
        )
        if draw is None:
            best = self._best[:num_rows].argmax(1, keepdim=True)
            out.copy_(self._best_id[:num_rows].gather(1, best)[:, 0])
            return out
        if cut is not None:
            row_threshold[(num_rows,)](
                logits, self._best, self._threshold, self._equals, draw.temperature, cut.top_k, cut.top_p, cut.min_p,
                *size, SPLITS=self._splits, BLOCK=4 * BLOCK, num_warps=16,
            )  # fmt: skip
        row_weight[(num_rows, self._splits)](
            logits, self._best, self._weights, self._ties, self._threshold, draw.temperature, *size,
            SPLITS=self._splits, BLOCK=BLOCK, CUT=cut is not None, num_warps=4,
        )  # fmt: skip
        row_pick[(num_rows,)](
            logits, self._best, self._best_id, self._weights, self._ties, self._threshold, self._equals,
            draw.temperature, draw.seeds, draw.positions, draw.draws, out, *size, SPLITS=self._splits, BLOCK=BLOCK,
            CUT=cut is not None, num_warps=4,
        )  # fmt: skip
        return out
