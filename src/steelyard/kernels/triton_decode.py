"""Paged decode attention, split over the keys of long rows. The kernels; the backend in triton_attention launches them.

One program: one item of triton_plan (a range of keys of one row) and one KV head, whose G query heads are the rows of
the matrix product. A row of several parts is merged in part order, so results repeat bit for bit: by the last program
to finish (MERGE_LAST, where many rows keep the machine busy), or by a second small kernel under early launch
(few rows: an atomic costs more there than a graph node).

Source: Dao et al. 2023, "Flash-Decoding"; packed query heads as in grouped-query attention, Ainslie et al. 2023.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from steelyard.kernels.triton_common import (
    LOG2E,
    block_ids,
    kv_offsets,
    let_successor_in,
    logits_log2,
    normalised,
    online_softmax,
    query_in,
    wait_for_predecessor,
)


@triton.jit
def _merge(Out, Lse, PartOut, PartLse, token, kv_head, first, parts, out_stride, h0, H: tl.constexpr,
           HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PB: tl.constexpr, HEADS: tl.constexpr,
           GB: tl.constexpr, WANT_LSE: tl.constexpr):  # fmt: skip
    """Weigh the parts of one row for HEADS of one KV head's query heads (from h0), PB parts at a time, in order."""
    G: tl.constexpr = H // HK
    g, d, pp = h0 + tl.arange(0, GB), tl.arange(0, DP), tl.arange(0, PB)
    live = g < h0 + HEADS
    m = tl.full([GB], -1.0e20, tl.float32)
    den = tl.zeros([GB], tl.float32)
    acc = tl.zeros([GB, DP], tl.float32)
    for p0 in range(0, parts, PB):
        slot = ((first + p0 + pp) * HK + kv_head)[:, None] * G + g[None, :]
        ok = (p0 + pp < parts)[:, None] & live[None, :]
        lse = tl.load(PartLse + slot, mask=ok, other=-float("inf"), cache_modifier=".cg")
        at = PartOut + slot.to(tl.int64)[:, :, None] * D + d[None, None, :]
        o = tl.load(at, mask=ok[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(lse, 0))
        weight = tl.math.exp2(lse - m_new[None, :])
        alpha = tl.math.exp2(m - m_new)
        den = den * alpha + tl.sum(weight, 0)
        acc = acc * alpha[:, None] + tl.sum(o * weight[:, :, None], 0)
        m = m_new
    head = kv_head * G + g
    at = Out + token.to(tl.int64) * out_stride + head[:, None] * D + d[None, :]
    tl.store(at, normalised(acc, den).to(Out.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    if WANT_LSE:
        tl.store(Lse + token * H + head, (m + tl.math.log2(den)) * 0.6931471805599453, mask=live)


@triton.jit
def decode_merge(Out, Lse, PartOut, PartLse, Rows, out_stride, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
                 DP: tl.constexpr, PB: tl.constexpr, WANT_LSE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Second kernel of the two-kernel form, grid (rows, H): merges one head of a row that has several parts."""
    row, h = tl.program_id(0), tl.program_id(1)
    first, parts, token = tl.load(Rows + row * 4), tl.load(Rows + row * 4 + 1), tl.load(Rows + row * 4 + 2)
    wait_for_predecessor(PDL)
    let_successor_in(PDL)
    G: tl.constexpr = H // HK
    if parts > 1:
        _merge(Out, Lse, PartOut, PartLse, token, h // G, first, parts, out_stride, h % G, H, HK, D, DP, PB, 1, 1,
               WANT_LSE)  # fmt: skip


@triton.jit
def _key(j, out, KEEP: tl.constexpr, BN: tl.constexpr):
    """The key that an item counts as its j-th, j a multiple of BN or the last: `out` more behind the first KEEP."""
    if KEEP > 0:
        j += tl.where(j >= (KEEP + BN - 1) // BN * BN, out, 0)
    return j


@triton.jit
def _two_of(pairs):
    """float16 tiles of the even and of the odd dimensions of e4m3 numbers, held in twos as int16.

    A matrix operand is transposed on its way out of shared memory in units of 16 bits: single bytes would be fetched
    one by one, 64 loads a thread and tile with conflicts, and bound the kernel. The byte shuffle is the same in both.
    """
    even = tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $1, 0, 0x3120; mov.b32 {lo, hi}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, lo; }", "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip
    odd = tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $1, 0, 0x3120; mov.b32 {lo, hi}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, hi; }", "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip
    return even, odd


@triton.jit(do_not_specialize=["table_stride"])
def decode_split(Q, K, V, KScale, VScale, Out, Lse, PartOut, PartLse, Done, Sinks, Table, Items, Count, scale, cap,
                 q_stride, out_stride, table_stride, block_stride, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
                 DP: tl.constexpr, GP: tl.constexpr, GB: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
                 CARRY: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                 SINKS: tl.constexpr, WANT_LSE: tl.constexpr, MERGE_LAST: tl.constexpr, PB: tl.constexpr,
                 SCALED: tl.constexpr, PAIRED: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (HK, items). Q, Out [T, H, D] rows q_stride, out_stride apart; K, V [blocks, HK, BLOCK, D] pools.

    CARRY loads block ids one tile ahead; without it the pipeline keeps a single K/V buffer, which lets five programs
    share a multiprocessor where they would not fit otherwise. WINDOW 0: none; else the first tile may reach before
    the row's window and is masked; KEEP: the first keys, which are seen too and read first. SCALED: K and V are fp8,
    KScale and VScale float32 [HK]; PAIRED: V is the same pool as int16 [blocks, HK, BLOCK, D / 2]. PartOut float32
    [items, H, D], PartLse float32 [items, H] in base 2.
    """
    G: tl.constexpr = H // HK
    kv_head, item = tl.program_id(0), tl.program_id(1)
    count = tl.load(Count)
    w = Items + item * 8
    row, token, lo, hi = tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)
    first, parts, ctx = tl.load(w + 4), tl.load(w + 5), tl.load(w + 6)
    let_successor_in(PDL)
    wait_for_predecessor(PDL)
    if item >= count:
        return
    g, d, n = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BN)
    head = kv_head * G + g
    live = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(Q + token.to(tl.int64) * q_stride + head[:, None] * D + d[None, :], mask=live, other=0.0)
    q = query_in(q, D, SCALED)
    if SCALED:
        scale *= tl.load(KScale + kv_head)
    m = tl.full([GP], -1.0e20, tl.float32)
    den = tl.zeros([GP], tl.float32)
    if SINKS:
        sink = tl.load(Sinks + head, mask=g < G, other=0.0).to(tl.float32) * LOG2E
        m = tl.where(item == first, sink, m)  # the sink is a key of the row's first part, with value 0
        den = tl.where(item == first, 1.0, den)
    VP: tl.constexpr = DP // 2 if PAIRED else DP
    acc = tl.zeros([GP, VP], tl.float32)
    odd = acc
    dv = tl.arange(0, VP)
    table = Table + row.to(tl.int64) * table_stride
    out = 0
    if KEEP > 0:
        out = tl.load(w + 7)
    last = _key(tl.maximum(hi - 1, 0), out, KEEP, BN)
    ids = block_ids(table, _key(lo, out, KEEP, BN), last, n, BLOCK, BN)
    for j in tl.range(lo, hi, BN, num_stages=STAGES):
        if not CARRY:
            ids = block_ids(table, _key(j, out, KEEP, BN), last, n, BLOCK, BN)
        key = _key(j, out, KEEP, BN)
        off = kv_offsets(ids, key, n, kv_head, block_stride, BLOCK, D, BN)
        off_v = off
        if PAIRED:
            off_v = kv_offsets(ids, key, n, kv_head, block_stride // 2, BLOCK, D // 2, BN)
        seen = j + n < hi
        if DP == D:
            k = tl.load(K + off[None, :] + d[:, None])
            v = tl.load(V + off_v[:, None] + dv[None, :])
        else:
            k = tl.load(K + off[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
            v = tl.load(V + off_v[:, None] + dv[None, :], mask=(dv < D * VP // DP)[None, :], other=0 if PAIRED else 0.0)
        if SCALED:
            k = k.to(q.dtype)
        if WINDOW > 0:
            seen = seen & ((key + n >= ctx - WINDOW) | (key + n < KEEP))
        s = logits_log2(tl.dot(q, k, input_precision="ieee"), scale, cap, SOFTCAP)
        s = tl.where(seen[None, :], s, -float("inf"))
        p, m, den, alpha = online_softmax(s, m, den)
        p = p.to(q.dtype if SCALED else v.dtype)
        if PAIRED:
            v, v_odd = _two_of(v)
            odd = tl.dot(p, v_odd, odd * alpha[:, None])
        acc = tl.dot(p, v.to(p.dtype), acc * alpha[:, None], input_precision="ieee")
        if CARRY:
            ids = block_ids(table, _key(j + BN, out, KEEP, BN), last, n, BLOCK, BN)
    if PAIRED:
        acc = tl.interleave(acc, odd)
    acc = normalised(acc, den)
    if SCALED:
        acc *= tl.load(VScale + kv_head)
    if parts == 1:
        tl.store(Out + token.to(tl.int64) * out_stride + head[:, None] * D + d[None, :],
                 acc.to(Out.dtype.element_ty), mask=live)  # fmt: skip
        if WANT_LSE:
            tl.store(Lse + token * H + head, (m + tl.math.log2(den)) * 0.6931471805599453, mask=g < G)
    else:
        slot = (item * HK + kv_head) * G + g
        tl.store(PartOut + slot.to(tl.int64)[:, None] * D + d[None, :], acc, mask=live)
        tl.store(PartLse + slot, m + tl.math.log2(den), mask=g < G)
        if MERGE_LAST:
            tl.debug_barrier()  # all of this program's parts are stored before the count says so
            done = tl.atomic_add(Done + row * HK + kv_head, 1, sem="acq_rel", scope="gpu")
            if done == parts - 1:
                tl.debug_barrier()
                _merge(Out, Lse, PartOut, PartLse, token, kv_head, first, parts, out_stride, 0, H, HK, D, DP, PB, G,
                       GB, WANT_LSE)  # fmt: skip
                tl.store(Done + row * HK + kv_head, 0)
