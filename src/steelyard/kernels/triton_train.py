"""The training forward in Triton: FlashAttention over contiguous packed sequences, with dropout, keeping the
log-sum-exp for the backward. Not the serving path: no paged KV here.

One program: BM queries of one head, all keys they see, in up to three ranges so that only edges pay for a mask.

    keys   | window edge, masked | interior, unmasked | diagonal and ragged end, masked |
           lo                 inner_lo             inner_hi                            hi

Source: Dao et al. 2022, "FlashAttention", Algorithm 1; Dao 2023, "FlashAttention-2", Algorithm 1.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: E741
from __future__ import annotations

import triton
import triton.language as tl

from steelyard.kernels.triton_tiles import (
    kept,
    load_tile,
    padded_rows,
    sequence_of_tile,
    store_tile,
    stream_tile,
    visible,
)


@triton.jit
def key_ranges(p_first, num_keys, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """(lo, inner_lo, inner_hi, hi) of the keys that queries at positions p_first .. p_first + BM - 1 see."""
    hi = num_keys
    inner_hi = num_keys // BN * BN
    if CAUSAL:
        hi = tl.maximum(tl.minimum(num_keys, p_first + BM), 0)
        inner_hi = tl.maximum(tl.minimum(inner_hi, (p_first + 1) // BN * BN), 0)
    lo = 0
    inner_lo = 0
    if WINDOW > 0:
        lo = tl.maximum(p_first - WINDOW + 1, 0) // BN * BN
        last = tl.maximum(p_first + BM - WINDOW, 0)
        inner_lo = tl.minimum((last + BN - 1) // BN * BN, hi)
        inner_hi = tl.maximum(inner_hi, inner_lo)
    return lo, inner_lo, inner_hi, hi


@triton.jit
def _attend(
    acc, m, l, q, KD, VD, k_start, kv_head, lo, hi, num_keys, position, row, head, scale_log2, seed, threshold,
    BD: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys lo .. hi in base 2: returns the new (acc, m, l)."""
    n = tl.arange(0, BN)
    for j in tl.range(lo, hi, BN, num_stages=STAGES):
        k = stream_tile(KD, k_start + j, kv_head, BN, BD)
        v = stream_tile(VD, k_start + j, kv_head, BN, BD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            s = tl.where(visible(position[:, None], (j + n)[None, :], num_keys, CAUSAL, WINDOW), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        shift = m_new
        if MASKED:  # a row that has seen no key yet: -inf - 0 stays -inf, -inf - -inf would be NaN
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s * scale_log2 - shift[:, None])
        alpha = tl.math.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(seed, head, row[:, None], (j + n)[None, :], threshold), p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["num_seqs", "seed", "threshold"])
def train_forward_kernel(
    Q, KD, VD, OUT, LSE, CU_Q, CU_K, num_seqs, scale_log2, seed, threshold, keep_scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (H, Tq // BM + S). KD, VD: descriptors of [Tk, HK, D] with blocks [BN, 1, BD]. OUT [Tq, H, D].

    LSE fp32 in base 2, padded to whole tiles of BM rows; +inf for padding and for a row that sees no key (its OUT is
    0): the backward's exp2(s - lse) is then 0 by itself. Tile numbers run downwards: in a causal sequence the last
    tile has the most keys, and long work should start first.
    """
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = sequence_of_tile(CU_Q, num_seqs, tile, BM)
    q_start, k_start = tl.load(CU_Q + seq), tl.load(CU_K + seq)
    num_q, num_keys = tl.load(CU_Q + seq + 1) - q_start, tl.load(CU_K + seq + 1) - k_start
    i = (tile - (q_start // BM + seq)) * BM
    if i >= num_q:
        return
    kv_head = head // (H // HK)
    rows, cols = tl.arange(0, BM), tl.arange(0, BD)
    position = i + rows + num_keys - num_q
    row = q_start + i + rows
    q = load_tile(Q + head * D, q_start + i, rows, cols, q_start + num_q, H * D, D)
    lo, inner_lo, inner_hi, hi = key_ranges(i + num_keys - num_q, num_keys, BM, BN, CAUSAL, WINDOW)
    acc = tl.zeros([BM, BD], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    if WINDOW > 0:
        acc, m, l = _attend(
            acc, m, l, q, KD, VD, k_start, kv_head, lo, inner_lo, num_keys, position, row, head, scale_log2, seed,
            threshold, BD, BN, CAUSAL, WINDOW, DROPOUT, True, STAGES,
        )  # fmt: skip
    acc, m, l = _attend(
        acc, m, l, q, KD, VD, k_start, kv_head, inner_lo, inner_hi, num_keys, position, row, head, scale_log2, seed,
        threshold, BD, BN, CAUSAL, WINDOW, DROPOUT, False, STAGES,
    )  # fmt: skip
    acc, m, l = _attend(
        acc, m, l, q, KD, VD, k_start, kv_head, inner_hi, hi, num_keys, position, row, head, scale_log2, seed,
        threshold, BD, BN, CAUSAL, WINDOW, DROPOUT, True, STAGES,
    )  # fmt: skip
    seen = (l > 0) & (i + rows < num_q)
    out = acc * (keep_scale / tl.where(seen, l, 1.0))[:, None]
    store_tile(OUT + head * D, q_start + i, rows, cols, q_start + num_q, out, H * D, D)
    lse = tl.where(seen, m + tl.math.log2(tl.where(seen, l, 1.0)), float("inf"))
    tl.store(padded_rows(LSE, head, tl.num_programs(1), q_start, seq, BM) + i + rows, lse)
