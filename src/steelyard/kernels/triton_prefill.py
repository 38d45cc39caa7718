"""Paged causal prefill attention over ragged rows: chunks on context, any group of query heads. One kernel, two loads.

One program: one tile of triton_plan (TOKENS = BM // G tokens of one row) and one KV head; its BM matrix rows are
TOKENS x G heads packed. K and V tiles come by pointers, for any block size, or by host TMA descriptors over the pool
seen as a matrix of D-wide rows, where a block holds whole tiles.

    keys   | window edge and interior | diagonal, masked |          with a window every tile is masked
           lo                       full                hi

The wider the pipeline the better only if block ids are carried one tile ahead; two programs a multiprocessor beat a
deeper pipeline at D = 128. Source: Dao 2023, "FlashAttention-2"; Kwon et al. 2023, "PagedAttention".
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
def _load_tile(K, V, ids, key, n, d, kv_head, block_stride, dtype: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
               BLOCK: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """(k [DP, BN], v [BN, DP]) of keys key + n, in `dtype`.

    TMA: block_stride counts D-wide rows, and columns past D come as 0.
    """
    if TMA:
        row = ids * block_stride + kv_head * BLOCK + key % BLOCK
        k = K.load([row, 0]).T
        v = V.load([row, 0])
    else:
        off = kv_offsets(ids, key, n, kv_head, block_stride, BLOCK, D, n.shape[0])
        if DP == D:
            k = tl.load(K + off[None, :] + d[:, None])
            v = tl.load(V + off[:, None] + d[None, :])
        else:
            k = tl.load(K + off[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
            v = tl.load(V + off[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    return k.to(dtype), v.to(dtype)


@triton.jit(do_not_specialize=["table_stride"])
def prefill(Q, K, V, KScale, VScale, Out, Lse, Sinks, Table, Tiles, Count, Ctx, scale, cap, q_stride, out_stride,
            table_stride, block_stride, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
            CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
            WANT_LSE: tl.constexpr, SCALED: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (HK, tiles). Q, Out [T, H, D] rows q_stride, out_stride apart; K, V pools or descriptors [*, D].

    WINDOW 0: none; KEEP: the first keys, which are seen behind it too. SCALED: K and V are fp8, KScale and VScale
    float32 [HK]. The last BM % G matrix rows are idle. Ctx int32 [R] is read only if not CAUSAL.
    """
    G: tl.constexpr = H // HK
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    count = tl.load(Count)
    w = Tiles + tile * 4
    row, token, pos0, tokens = tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)
    let_successor_in(PDL)
    wait_for_predecessor(PDL)
    if tile >= count:
        return
    mm, d, n = tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, BN)
    tok, head = mm // G, kv_head * G + mm % G
    live = (tok < tokens)[:, None] & (d < D)[None, :]
    at = (token + tok)[:, None].to(tl.int64)
    q = tl.load(Q + at * q_stride + head[:, None] * D + d[None, :], mask=live, other=0.0)
    q = query_in(q, D, SCALED)
    if SCALED:
        scale *= tl.load(KScale + kv_head)
    pos = pos0 + tok
    if CAUSAL:
        hi = pos0 + tokens
        last_seen = pos
        full = (pos0 + 1) // BN * BN
    else:
        hi = tl.load(Ctx + row)
        last_seen = tl.zeros([BM], tl.int32) + hi - 1
        full = hi // BN * BN
    lo = 0
    if WINDOW > 0:
        lo = tl.maximum(pos0 - WINDOW + 1, 0) // BN * BN
        full = lo
    m = tl.full([BM], -1.0e20, tl.float32)
    den = tl.zeros([BM], tl.float32)
    if SINKS:
        m = tl.load(Sinks + head).to(tl.float32) * LOG2E
        den = tl.full([BM], 1.0, tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    table = Table + row.to(tl.int64) * table_stride
    if KEEP > 0:  # the first keys, as far as they lie before the window's first tile
        for j in tl.range(0, tl.minimum((KEEP + BN - 1) // BN * BN, lo), BN, num_stages=1):
            ids = block_ids(table, j, hi - 1, n, BLOCK, BN)
            k, v = _load_tile(K, V, ids, j, n, d, kv_head, block_stride, q.dtype, D, DP, BLOCK, TMA)
            s = logits_log2(tl.dot(q, k, input_precision="ieee"), scale, cap, SOFTCAP)
            p, m, den, alpha = online_softmax(tl.where((j + n < KEEP)[None, :], s, -float("inf")), m, den)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    ids = block_ids(table, lo, hi - 1, n, BLOCK, BN)
    for j in tl.range(lo, full, BN, num_stages=STAGES):
        k, v = _load_tile(K, V, ids, j, n, d, kv_head, block_stride, q.dtype, D, DP, BLOCK, TMA)
        s = logits_log2(tl.dot(q, k, input_precision="ieee"), scale, cap, SOFTCAP)
        p, m, den, alpha = online_softmax(s, m, den)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        ids = block_ids(table, j + BN, hi - 1, n, BLOCK, BN)
    for j in tl.range(full, hi, BN, num_stages=STAGES):
        k, v = _load_tile(K, V, ids, j, n, d, kv_head, block_stride, q.dtype, D, DP, BLOCK, TMA)
        s = logits_log2(tl.dot(q, k, input_precision="ieee"), scale, cap, SOFTCAP)
        seen = (j + n)[None, :] <= last_seen[:, None]
        if WINDOW > 0:
            seen = seen & (((j + n)[None, :] > pos[:, None] - WINDOW) | (j + n < KEEP)[None, :])
        p, m, den, alpha = online_softmax(tl.where(seen, s, -float("inf")), m, den)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        ids = block_ids(table, j + BN, hi - 1, n, BLOCK, BN)
    o = normalised(acc, den)
    if SCALED:
        o *= tl.load(VScale + kv_head)
    tl.store(Out + at * out_stride + head[:, None] * D + d[None, :], o.to(Out.dtype.element_ty), mask=live)
    if WANT_LSE:
        lse = (m + tl.math.log2(den)) * 0.6931471805599453
        tl.store(Lse + (token + tok) * H + head, lse, mask=tok < tokens)
