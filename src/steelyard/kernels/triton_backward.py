"""The attention backward in Triton: dQ, dK, dV with the probabilities computed again from the saved log-sum-exp.

With S = scale q k^T, P = exp(S - lse), dropout mask M / (1 - p), O = (P M) V and the upstream gradient dO:

    delta_i = sum_d dO_id O_id                 one number a row: what the softmax's Jacobian needs
    dV = (P M)^T dO        dP = (dO V^T) M        dS = P (dP - delta)        dQ = scale dS K        dK = scale dS^T Q

Three kernels, no atomics, so the same inputs give the same bits: rows of delta; dK and dV of one key tile (loops over
the G query heads of its KV head and the queries that see it); dQ of one query tile (loops over its keys). S and dP
are computed in both of the latter: 7 products where a kernel with atomics does 5.

Source: Dao et al. 2022, "FlashAttention", Algorithm 4; Dao 2023, "FlashAttention-2", Algorithm 2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
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
from steelyard.kernels.triton_train import key_ranges


@triton.jit(do_not_specialize=["num_seqs"])
def delta_kernel(
    OUT, DO, DELTA, CU_Q, num_seqs, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr
):
    """Grid (H, row tiles). DELTA = sum over D of OUT dO, both [Tq, H, D], padded like the log-sum-exp, with zeros."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    seq = sequence_of_tile(CU_Q, num_seqs, tile, ROWS)
    start, end = tl.load(CU_Q + seq), tl.load(CU_Q + seq + 1)
    i = (tile - (start // ROWS + seq)) * ROWS
    rows, cols = tl.arange(0, ROWS), tl.arange(0, BD)
    out = load_tile(OUT + head * D, start + i, rows, cols, end, H * D, D).to(tl.float32)
    do = load_tile(DO + head * D, start + i, rows, cols, end, H * D, D).to(tl.float32)
    tl.store(padded_rows(DELTA, head, tl.num_programs(1), start, seq, ROWS) + i + rows, tl.sum(out * do, 1))


@triton.jit
def query_ranges(
    first_key, num_q, num_keys, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """(lo, inner_lo, inner_hi, hi) of the queries that see keys first_key .. first_key + BN - 1: diagonal, interior,
    window edge. All but hi are multiples of BM.

    A ragged tile needs no mask: a key past the end is a row of the transposed scores that nobody stores, and a query
    past the end has lse = +inf in the padding, which makes its probabilities 0.
    """
    offset = num_keys - num_q
    lo = 0
    inner_lo = 0
    if CAUSAL:
        lo = tl.maximum(first_key - offset, 0) // BM * BM
        inner_lo = (tl.maximum(first_key + BN - 1 - offset, 0) + BM - 1) // BM * BM
    hi = num_q
    inner_hi = (num_q + BM - 1) // BM * BM
    if WINDOW > 0:
        hi = tl.maximum(tl.minimum(num_q, first_key + BN - 1 + WINDOW - offset), 0)
        inner_hi = tl.minimum(inner_hi, tl.maximum(first_key + WINDOW - offset, 0) // BM * BM)
    inner_hi = tl.maximum(inner_hi, lo)
    inner_lo = tl.minimum(tl.maximum(inner_lo, lo), inner_hi)
    return lo, inner_lo, inner_hi, hi


@triton.jit
def _key_gradients(
    dk, dv, k, v, QD, DOD, lse_base, delta_base, q_start, head, lo, hi, num_q, num_keys, key, scale_log2, seed,
    threshold, keep_scale, BD: tl.constexpr, BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what queries lo .. hi of one head give to dK and dV of a key tile. Scores are kept transposed, [BN, BM], so
    that they are the left operand of both products and stay in registers."""
    mm = tl.arange(0, BM)
    for i in tl.range(lo, hi, BM, num_stages=STAGES):
        q = stream_tile(QD, q_start + i, head, BM, BD)
        do = stream_tile(DOD, q_start + i, head, BM, BD)
        lse = tl.load(lse_base + i + mm)
        delta = tl.load(delta_base + i + mm)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        p = tl.math.exp2(s * scale_log2 - lse[None, :])
        if MASKED:
            position = i + mm + num_keys - num_q
            p = tl.where(visible(position[None, :], key[:, None], num_keys, CAUSAL, WINDOW), p, 0.0)
        if DROPOUT:
            keep = kept(seed, head, (q_start + i + mm)[None, :], key[:, None], threshold)
            dv = tl.dot(tl.where(keep, p * keep_scale, 0.0).to(do.dtype), do, dv, input_precision="ieee")
        else:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        if DROPOUT:
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p.to(do.dtype).to(tl.float32) * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "seed", "threshold"])
def key_gradient_kernel(
    QD, K, V, DOD, LSE, DELTA, DK, DV, CU_Q, CU_K, num_seqs, num_tiles, scale, scale_log2, seed, threshold, keep_scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (HK, Tk // BN + S): DK and DV [Tk, HK, D] of one key tile. QD, DOD: descriptors of [Tq, H, D] with blocks
    [BM, 1, BD]. Early keys are seen by most queries: tile numbers run upwards."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    seq = sequence_of_tile(CU_K, num_seqs, tile, BN)
    q_start, k_start = tl.load(CU_Q + seq), tl.load(CU_K + seq)
    num_q, num_keys = tl.load(CU_Q + seq + 1) - q_start, tl.load(CU_K + seq + 1) - k_start
    j = (tile - (k_start // BN + seq)) * BN
    if j >= num_keys:
        return
    n, cols = tl.arange(0, BN), tl.arange(0, BD)
    key = j + n
    k = load_tile(K + kv_head * D, k_start + j, n, cols, k_start + num_keys, HK * D, D)
    v = load_tile(V + kv_head * D, k_start + j, n, cols, k_start + num_keys, HK * D, D)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    lo, inner_lo, inner_hi, hi = query_ranges(j, num_q, num_keys, BM, BN, CAUSAL, WINDOW)
    for head in range(kv_head * (H // HK), (kv_head + 1) * (H // HK)):
        lse_base = padded_rows(LSE, head, num_tiles, q_start, seq, ROWS)
        delta_base = padded_rows(DELTA, head, num_tiles, q_start, seq, ROWS)
        if CAUSAL:
            dk, dv = _key_gradients(
                dk, dv, k, v, QD, DOD, lse_base, delta_base, q_start, head, lo, inner_lo, num_q, num_keys, key,
                scale_log2, seed, threshold, keep_scale, BD, BM, CAUSAL, WINDOW, DROPOUT, True, STAGES,
            )  # fmt: skip
        dk, dv = _key_gradients(
            dk, dv, k, v, QD, DOD, lse_base, delta_base, q_start, head, inner_lo, inner_hi, num_q, num_keys, key,
            scale_log2, seed, threshold, keep_scale, BD, BM, CAUSAL, WINDOW, DROPOUT, False, STAGES,
        )  # fmt: skip
        if WINDOW > 0:
            dk, dv = _key_gradients(
                dk, dv, k, v, QD, DOD, lse_base, delta_base, q_start, head, inner_hi, hi, num_q, num_keys, key,
                scale_log2, seed, threshold, keep_scale, BD, BM, CAUSAL, WINDOW, DROPOUT, True, STAGES,
            )  # fmt: skip
    store_tile(DK + kv_head * D, k_start + j, n, cols, k_start + num_keys, dk * scale, HK * D, D)
    store_tile(DV + kv_head * D, k_start + j, n, cols, k_start + num_keys, dv, HK * D, D)


@triton.jit
def _query_gradients(
    dq, q, do, lse, delta, KD, VD, k_start, kv_head, lo, hi, num_keys, position, row, head, scale_log2, seed,
    threshold, keep_scale, BD: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what keys lo .. hi give to dQ of a query tile."""
    n = tl.arange(0, BN)
    for j in tl.range(lo, hi, BN, num_stages=STAGES):
        k = stream_tile(KD, k_start + j, kv_head, BN, BD)
        v = stream_tile(VD, k_start + j, kv_head, BN, BD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        p = tl.math.exp2(s * scale_log2 - lse[:, None])
        if MASKED:
            p = tl.where(visible(position[:, None], (j + n)[None, :], num_keys, CAUSAL, WINDOW), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        if DROPOUT:
            dp = tl.where(kept(seed, head, row[:, None], (j + n)[None, :], threshold), dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "seed", "threshold"])
def query_gradient_kernel(
    Q, KD, VD, DO, LSE, DELTA, DQ, CU_Q, CU_K, num_seqs, num_tiles, scale, scale_log2, seed, threshold, keep_scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (H, Tq // BM + S): DQ [Tq, H, D] of one query tile. KD, VD: descriptors of [Tk, HK, D] with blocks
    [BN, 1, BD]. Tile numbers run downwards, as in the forward."""
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
    do = load_tile(DO + head * D, q_start + i, rows, cols, q_start + num_q, H * D, D)
    lse = tl.load(padded_rows(LSE, head, num_tiles, q_start, seq, ROWS) + i + rows)
    delta = tl.load(padded_rows(DELTA, head, num_tiles, q_start, seq, ROWS) + i + rows)
    lo, inner_lo, inner_hi, hi = key_ranges(i + num_keys - num_q, num_keys, BM, BN, CAUSAL, WINDOW)
    dq = tl.zeros([BM, BD], tl.float32)
    if WINDOW > 0:
        dq = _query_gradients(
            dq, q, do, lse, delta, KD, VD, k_start, kv_head, lo, inner_lo, num_keys, position, row, head, scale_log2,
            seed, threshold, keep_scale, BD, BN, CAUSAL, WINDOW, DROPOUT, True, STAGES,
        )  # fmt: skip
    dq = _query_gradients(
        dq, q, do, lse, delta, KD, VD, k_start, kv_head, inner_lo, inner_hi, num_keys, position, row, head, scale_log2,
        seed, threshold, keep_scale, BD, BN, CAUSAL, WINDOW, DROPOUT, False, STAGES,
    )  # fmt: skip
    dq = _query_gradients(
        dq, q, do, lse, delta, KD, VD, k_start, kv_head, inner_hi, hi, num_keys, position, row, head, scale_log2,
        seed, threshold, keep_scale, BD, BN, CAUSAL, WINDOW, DROPOUT, True, STAGES,
    )  # fmt: skip
    store_tile(DQ + head * D, q_start + i, rows, cols, q_start + num_q, dq * scale, H * D, D)
