"""Which tokens top-k, top-p and min-p leave, without sorting a row: by bisection over logits. Kernels, no launcher.

    row_collect    grid (S, splits)   the best few of each share, found by bisection in registers
    row_threshold  grid (S)           the lowest kept logit over those few; a row they do not decide: over all

Used by triton_sample, whose file says what a weight is and how tokens rank.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from steelyard.kernels.triton_common import LOG2E


@triton.jit
def order_key(x):
    """int32 that orders as float32 x does."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def token_weight(x, best, per_temperature):
    """floor(2^32 exp((x - best) / temperature)) as int64; 0 for -inf."""
    return (tl.math.exp2((x - best) * per_temperature) * 4294967296.0).to(tl.int64)


@triton.jit
def load_logits(Logits, row, i, V, stride):
    x = tl.load(Logits + row * stride + i, mask=i < V, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, -float("inf"))


@triton.jit
def _floor_key(best, per_temperature, min_p):
    """Key of the lowest logit that min-p leaves; of a very low one without min-p."""
    floor = -3.0e38
    if min_p > 0:
        floor = best + tl.math.log2(min_p) / per_temperature
    return order_key(floor)


@triton.jit
def row_collect(Logits, Best, Few, FewCount, Limit, Weights, Temperature, MinP, V, stride, SPLITS: tl.constexpr,
                SHARE: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """The best FEW tokens of a share, at most those with 2^-20 of the best one's weight; the key from which on they
    are complete; and the weight of the whole share that min-p leaves. SHARE >= V / SPLITS is held in registers."""
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.max(tl.load(Best + row * SPLITS + tl.arange(0, SPLITS)), 0)
    per_temperature = LOG2E / tl.maximum(tl.load(Temperature + row), 1e-5)
    floor = _floor_key(best, per_temperature, tl.load(MinP + row))
    share = tl.cdiv(V, SPLITS)
    j = tl.arange(0, SHARE)
    x = load_logits(Logits, row, s * share + j, V, stride)
    x = tl.where(j < share, x, -float("inf"))
    key = order_key(x)
    weight = tl.sum(tl.where(key >= floor, token_weight(x, best, per_temperature), 0), 0)
    limit = tl.maximum(order_key(best - 20.0 / per_temperature), -0x7F000000)
    high = tl.maximum(order_key(best), limit) + 1
    if tl.sum((key >= limit).to(tl.int32), 0) > FEW:
        while limit < high:
            middle = limit + ((high.to(tl.int64) - limit.to(tl.int64)) // 2).to(tl.int32)
            if tl.sum((key >= middle).to(tl.int32), 0) <= FEW:
                high = middle
            else:
                limit = middle + 1
    kept = (key >= limit).to(tl.int32)
    place = tl.cumsum(kept, 0) - kept
    tl.store(Few + (row * SPLITS + s) * FEW + place, x, mask=kept == 1)
    tl.store(FewCount + row * SPLITS + s, tl.sum(kept, 0))
    tl.store(Limit + row * SPLITS + s, limit)
    tl.store(Weights + row * SPLITS + s, weight)


@triton.jit
def _above(keys, weights, Logits, row, pivot, best, per_temperature, V, stride, BLOCK: tl.constexpr,
           ALL: tl.constexpr):  # fmt: skip
    """(count, weight) of tokens whose key is at least `pivot`: of the collected ones, or of the row if ALL."""
    if ALL:
        count = tl.zeros([BLOCK], tl.int32)
        weight = tl.zeros([BLOCK], tl.int64)
        for at in range(0, V, BLOCK):
            x = load_logits(Logits, row, at + tl.arange(0, BLOCK), V, stride)
            is_above = (order_key(x) >= pivot) & (x > -float("inf"))
            count += is_above.to(tl.int32)
            weight += tl.where(is_above, token_weight(x, best, per_temperature), 0)
    else:
        count = (keys >= pivot).to(tl.int32)
        weight = tl.where(keys >= pivot, weights, 0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _lowest_kept(keys, weights, Logits, row, low, high, max_count, max_weight, best, per_temperature, V, stride,
                 BLOCK: tl.constexpr, ALL: tl.constexpr):  # fmt: skip
    """Largest key in [low, high] whose tokens from it upwards reach max_count or max_weight; low if none does."""
    while low < high:
        middle = low + ((high.to(tl.int64) - low.to(tl.int64) + 1) // 2).to(tl.int32)
        count, weight = _above(keys, weights, Logits, row, middle, best, per_temperature, V, stride, BLOCK, ALL)
        if (count >= max_count) | (weight >= max_weight):
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def row_threshold(Logits, Best, Few, FewCount, Limit, Weights, Threshold, Equals, Temperature, TopK, TopP, MinP, V,
                  stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, ALL: tl.constexpr):  # fmt: skip
    """Lowest kept key and how many tokens that equal it are kept. min-p first, of the rest top-k, of those top-p.

    Without ALL a row that the collected tokens do not decide gets Equals -1; with ALL only such rows are worked on.
    """
    row = tl.program_id(0).to(tl.int64)
    undecided = -1
    if ALL:
        decided = tl.load(Equals + row) != undecided
        if decided:
            return
    s = tl.arange(0, SPLITS)
    best = tl.max(tl.load(Best + row * SPLITS + s), 0)
    temperature = tl.load(Temperature + row)
    per_temperature = LOG2E / tl.maximum(temperature, 1e-5)
    top_k, top_p = tl.load(TopK + row), tl.load(TopP + row)
    low = _floor_key(best, per_temperature, tl.load(MinP + row))
    high = tl.maximum(order_key(best), low)
    equals = 0x7FFFFFFF
    if (temperature >= 1e-5) & ((top_k > 0) | (top_p < 1.0)):
        i = tl.arange(0, SPLITS * FEW)
        num_few = tl.load(FewCount + row * SPLITS + i // FEW)
        collected = i % FEW < num_few
        x = tl.load(Few + row * (SPLITS * FEW) + i, mask=collected, other=-float("inf"))
        keys = tl.where(collected, order_key(x), -0x7FFFFFFF)
        weights = tl.where(collected, token_weight(x, best, per_temperature), 0)
        limit = tl.where(top_k > 0, top_k, 0x7FFFFFFF)
        if top_k > 0:
            low = _lowest_kept(keys, weights, Logits, row, low, high, limit, 0x7FFFFFFFFFFFFFFF, best,
                               per_temperature, V, stride, BLOCK, ALL)  # fmt: skip
        above, above_weight = _above(keys, weights, Logits, row, low + 1, best, per_temperature, V, stride, BLOCK, ALL)
        at_least, least_weight = _above(keys, weights, Logits, row, low, best, per_temperature, V, stride, BLOCK, ALL)
        equals = tl.minimum(at_least, limit) - above
        total = above_weight + equals * ((least_weight - above_weight) // tl.maximum(at_least - above, 1))
        limit_key = tl.max(tl.load(Limit + row * SPLITS + s), 0)
        decided = (low >= limit_key) | (top_k <= 0)
        if top_k <= 0:
            total = tl.sum(tl.load(Weights + row * SPLITS + s), 0)
        if top_p < 1.0:
            wanted = tl.maximum((total.to(tl.float64) * top_p).to(tl.int64), 1)
            kept_low = _lowest_kept(keys, weights, Logits, row, low, high, 0x7FFFFFFF, wanted, best, per_temperature,
                                    V, stride, BLOCK, ALL)  # fmt: skip
            above, above_weight = _above(keys, weights, Logits, row, kept_low + 1, best, per_temperature, V, stride,
                                         BLOCK, ALL)  # fmt: skip
            at_least, least_weight = _above(keys, weights, Logits, row, kept_low, best, per_temperature, V, stride,
                                            BLOCK, ALL)  # fmt: skip
            unit = tl.maximum((least_weight - above_weight) // tl.maximum(at_least - above, 1), 1)
            needed = ((wanted - above_weight + unit - 1) // unit).to(tl.int32)
            same = tl.where(kept_low == low, equals, at_least - above)
            equals = tl.maximum(tl.minimum(needed, same), 1)
            low = kept_low
            decided = decided & (low >= limit_key)
        if not ALL:
            equals = tl.where(decided, equals, undecided)
    tl.store(Threshold + row, low)
    tl.store(Equals + row, equals)
