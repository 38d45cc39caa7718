"""Paged causal prefill for Hopper in Gluon: one TMA producer warp feeds two matrix warpgroups, as in FlashAttention-3.

    producer   Q ring | K ring | V ring      kept full across work items, tiles from the diagonal backwards
    consumer   QK(t+1) issued, PV(t) issued, QK done, softmax(t+1) while PV(t) runs, PV done, rescale

Each consumer owns 64 matrix rows: 64 // G tokens x G heads of one KV head. The grid is persistent; work items are the
tiles of triton_plan (longest first) times KV heads, dealt out in a snake so that no program gets all the longest.

Source: Shah et al. 2024, "FlashAttention-3".
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from steelyard.kernels.attention import AttnSpec, KvLayer
from steelyard.kernels.gpu import Gpu
from steelyard.kernels.triton_common import LOG2E
from steelyard.kernels.triton_configs import MULTIPROCESSORS, AttentionShape

TILE, STAGES, Q_STAGES = 128, 2, 2
"""Keys of a tile, tiles of the K and V rings, query tiles of the Q ring. 64-key tiles were slower on every shape."""


@gluon.jit
def _item_of(turn):
    """Work item of this program's turn: even turns deal forwards, odd ones backwards."""
    at = gl.program_id(0)
    programs = gl.num_programs(0)
    odd = turn % 2
    return turn * programs + at + odd * (programs - 1 - 2 * at)


@gluon.jit
def _turns(num_items):
    """Items this program gets; only the last turn may be short."""
    whole = num_items // gl.num_programs(0)
    return whole + (_item_of(whole) < num_items).to(gl.int32)


@gluon.jit
def _tiles_of(pos0, tokens, BN: gl.constexpr, WINDOW: gl.constexpr):
    """(first, end) key tiles that any of the tokens at pos0 .. pos0 + tokens sees."""
    first = 0
    if WINDOW > 0:
        first = gl.maximum(pos0 - WINDOW + 1, 0) // BN
    return first, gl.cdiv(pos0 + tokens, BN)


@gluon.jit
def _produce(qd, kd, vd, Table, Tiles, table_stride, block_rows, num_items, qs, ks, vs, qbar, kbar, vbar,
             HK: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, BLOCK: gl.constexpr,
             BOX: gl.constexpr, ST: gl.constexpr, QST: gl.constexpr, WINDOW: gl.constexpr):  # fmt: skip
    """Barriers come in pairs: index 0.. are `full`, index stages.. are `empty`. A tile is BN // BOX copies."""
    t = 0
    for turn in range(_turns(num_items)):
        item = _item_of(turn)
        w = Tiles + (item // HK) * 4
        kv_head = item % HK
        row0 = gl.load(w + 1)
        pos0 = gl.load(w + 2)
        tokens = gl.load(w + 3)
        last_key = pos0 + tokens - 1
        table = Table + gl.load(w).to(gl.int64) * table_stride
        first, end = _tiles_of(pos0, tokens, BN, WINDOW)
        sq = turn % QST
        mbarrier.wait(qbar.index(QST + sq), ((turn // QST) & 1) ^ 1)
        mbarrier.expect(qbar.index(sq), 2 * 64 * D * 2)
        for c in gl.static_range(2):
            tma.async_copy_global_to_shared(qd, [row0 + c * (64 // G), kv_head * G, 0], qbar.index(sq),
                                            qs.index(sq * 2 + c))  # fmt: skip
        for i in range(end - first):
            key = (end - 1 - i) * BN
            at = ()
            for u in gl.static_range(BN // BOX):  # all block ids first: their latencies overlap
                k0 = gl.minimum(key + u * BOX, last_key)
                at = at + (gl.load(table + k0 // BLOCK) * block_rows + kv_head * BLOCK + (key + u * BOX) % BLOCK,)
            s = t % ST
            free = ((t // ST) & 1) ^ 1
            mbarrier.wait(kbar.index(ST + s), free)
            mbarrier.expect(kbar.index(s), BN * D * 2)
            for u in gl.static_range(BN // BOX):
                tma.async_copy_global_to_shared(kd, [at[u], 0], kbar.index(s), ks.index(s).slice(u * BOX, BOX))
            mbarrier.wait(vbar.index(ST + s), free)
            mbarrier.expect(vbar.index(s), BN * D * 2)
            for u in gl.static_range(BN // BOX):
                tma.async_copy_global_to_shared(vd, [at[u], 0], vbar.index(s), vs.index(s).slice(u * BOX, BOX))
            t += 1


@gluon.jit
def _softmax(qk, m, den, scale, cap, SOFTCAP: gl.constexpr):
    """Online softmax in base 2 of raw products (already masked with -inf if they need it)."""
    if SOFTCAP:
        s = cap * (1.0 - 2.0 / (1.0 + gl.exp2(qk * (scale * 2.0 * LOG2E / cap)))) * LOG2E
        s = gl.where(qk == -float("inf"), qk, s)
        m_new = gl.maximum(m, gl.max(s, 1))
        p = gl.exp2(s - m_new[:, None])
    else:
        m_new = gl.maximum(m, gl.max(qk, 1) * (scale * LOG2E))
        p = gl.exp2(qk * (scale * LOG2E) - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, m_new, den * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _mask(s, key, pos, WINDOW: gl.constexpr):
    seen = key[None, :] <= pos[:, None]
    if WINDOW > 0:
        seen = seen & (key[None, :] > pos[:, None] - WINDOW)
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def _issue(q, p16, acc, zero, ks, vs, kbar, vbar, t, ST: gl.constexpr):
    """Start the QK product of tile t + 1 and the PV product of tile t; return when QK is done."""
    sv = t % ST
    sk = (t + 1) % ST
    mbarrier.wait(kbar.index(sk), ((t + 1) // ST) & 1)
    s = warpgroup_mma(q, ks.index(sk).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(vbar.index(sv), (t // ST) & 1)
    acc = warpgroup_mma(p16, vs.index(sv), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(kbar.index(ST + sk), count=1)
    return s, acc


@gluon.jit
def _finish(acc, p, alpha, vbar, t, ST: gl.constexpr, o_lay: gl.constexpr, p_lay: gl.constexpr, DT: gl.constexpr):
    """Complete the PV product of tile t and rescale.

    The mbarrier wait is always satisfied: it only ends the basic block, because ptxas otherwise hoists the wgmma wait
    above the softmax and nothing overlaps.
    """
    mbarrier.wait(vbar.index(t % ST), (t // ST) & 1)
    acc, p = warpgroup_mma_wait(0, [acc, p])
    mbarrier.arrive(vbar.index(ST + t % ST), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_lay))[:, None]
    return acc, gl.convert_layout(p.to(DT), p_lay)


@gluon.jit
def _consume(Out, Lse, Sinks, Tiles, scale, cap, out_stride, num_items, qs, ks, vs, qbar, kbar, vbar,
             ME: gl.constexpr, HK: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
             ST: gl.constexpr, QST: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
             WANT_LSE: gl.constexpr):  # fmt: skip
    """Warpgroup ME: rows ME * 64 .. of each item; every work item ends with its own store."""
    R: gl.constexpr = 64
    DT: gl.constexpr = Out.dtype.element_ty
    s_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_lay: gl.constexpr = gl.DotOperandLayout(0, o_lay, 2)
    out_lay: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    srow: gl.constexpr = gl.SliceLayout(1, s_lay)
    orow: gl.constexpr = gl.SliceLayout(1, o_lay)
    rows = ME * R + gl.arange(0, R, srow)
    tok = rows // G
    col = gl.arange(0, BN, gl.SliceLayout(0, s_lay))
    zero = gl.zeros([R, BN], gl.float32, s_lay)
    t = 0
    for turn in range(_turns(num_items)):
        item = _item_of(turn)
        w = Tiles + (item // HK) * 4
        kv_head = item % HK
        row0 = gl.load(w + 1)
        pos0 = gl.load(w + 2)
        tokens = gl.load(w + 3)
        first, end = _tiles_of(pos0, tokens, BN, WINDOW)
        tiles = end - first
        full = (pos0 + 1) // BN  # tiles below this are visible to every row
        if WINDOW > 0:
            full = first
        pos = pos0 + tok
        head = kv_head * G + rows % G
        m = gl.full([R], -1.0e20, gl.float32, srow)  # finite: a row that sees no key yet must not make a NaN
        den = gl.full([R], 0.0, gl.float32, srow)
        if SINKS:
            m = gl.load(Sinks + head).to(gl.float32) * LOG2E
            den = gl.full([R], 1.0, gl.float32, srow)
        acc = gl.zeros([R, D], gl.float32, o_lay)
        sq = turn % QST
        q = qs.index(sq * 2 + ME).reshape([R, D])
        mbarrier.wait(qbar.index(sq), (turn // QST) & 1)
        st = t % ST
        mbarrier.wait(kbar.index(st), (t // ST) & 1)
        s = warpgroup_mma(q, ks.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(kbar.index(ST + st), count=1)
        s = _mask(s, (end - 1) * BN + col, pos, WINDOW)
        p, m, den, alpha = _softmax(s, m, den, scale, cap, SOFTCAP)
        p16 = gl.convert_layout(p.to(DT), p_lay)
        for i in range(1, end - full):  # further tiles across the diagonal, or all with a window
            s, acc_next = _issue(q, p16, acc, zero, ks, vs, kbar, vbar, t, ST)
            s = _mask(s, (end - 1 - i) * BN + col, pos, WINDOW)
            p, m, den, alpha = _softmax(s, m, den, scale, cap, SOFTCAP)
            acc, p16 = _finish(acc_next, p, alpha, vbar, t, ST, o_lay, p_lay, DT)
            t += 1
        for _ in range(gl.maximum(end - full, 1), tiles):
            s, acc_next = _issue(q, p16, acc, zero, ks, vs, kbar, vbar, t, ST)
            p, m, den, alpha = _softmax(s, m, den, scale, cap, SOFTCAP)
            acc, p16 = _finish(acc_next, p, alpha, vbar, t, ST, o_lay, p_lay, DT)
            t += 1
        mbarrier.arrive(qbar.index(QST + sq), count=1)
        sv = t % ST
        mbarrier.wait(vbar.index(sv), (t // ST) & 1)
        acc = warpgroup_mma(p16, vs.index(sv), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(vbar.index(ST + sv), count=1)
        t += 1
        if WANT_LSE:
            lse = (m + gl.log2(den)) * 0.6931471805599453
            gl.store(Lse + (row0 + tok) * (HK * G) + head, lse, mask=tok < tokens)
        out = gl.convert_layout((acc / gl.convert_layout(den, orow)[:, None]).to(DT), out_lay)
        r = ME * R + gl.arange(0, R, gl.SliceLayout(1, out_lay))
        d = gl.arange(0, D, gl.SliceLayout(0, out_lay))
        at = (row0 + r // G)[:, None].to(gl.int64) * out_stride + (kv_head * G + r % G)[:, None] * D + d[None, :]
        gl.store(Out + at, out, mask=(r // G < tokens)[:, None])


@gluon.jit(do_not_specialize=["table_stride"])
def prefill_hopper(qd, kd, vd, Out, Lse, Sinks, Table, Tiles, Count, scale, cap, out_stride, table_stride, block_rows,
                   HK: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, BLOCK: gl.constexpr,
                   BOX: gl.constexpr, ST: gl.constexpr, QST: gl.constexpr, WINDOW: gl.constexpr,
                   SOFTCAP: gl.constexpr, SINKS: gl.constexpr, WANT_LSE: gl.constexpr):  # fmt: skip
    """Persistent grid. qd [T, HK * G, D] in boxes [64 // G, G, D]; kd, vd the pool as D-wide rows in boxes [BOX, D]."""
    DT: gl.constexpr = Out.dtype.element_ty
    num_items = gl.load(Count) * HK
    qs = gl.allocate_shared_memory(DT, [2 * QST, 64 // G, G, D], qd.layout)
    ks = gl.allocate_shared_memory(DT, [ST, BN, D], kd.layout)
    vs = gl.allocate_shared_memory(DT, [ST, BN, D], vd.layout)
    qbar = gl.allocate_shared_memory(gl.int64, [2 * QST, 1], mbarrier.MBarrierLayout())
    kbar = gl.allocate_shared_memory(gl.int64, [2 * ST, 1], mbarrier.MBarrierLayout())
    vbar = gl.allocate_shared_memory(gl.int64, [2 * ST, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(QST):
        mbarrier.init(qbar.index(i), count=1)
        mbarrier.init(qbar.index(QST + i), count=2)
    for i in gl.static_range(ST):
        mbarrier.init(kbar.index(i), count=1)
        mbarrier.init(vbar.index(i), count=1)
        mbarrier.init(kbar.index(ST + i), count=2)
        mbarrier.init(vbar.index(ST + i), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (Out, Lse, Sinks, Tiles, scale, cap, out_stride, num_items, qs, ks, vs, qbar, kbar, vbar,
                    gl.constexpr(0), HK, G, D, BN, ST, QST, WINDOW, SOFTCAP, SINKS, WANT_LSE)),
        (_consume, (Out, Lse, Sinks, Tiles, scale, cap, out_stride, num_items, qs, ks, vs, qbar, kbar, vbar,
                    gl.constexpr(1), HK, G, D, BN, ST, QST, WINDOW, SOFTCAP, SINKS, WANT_LSE)),
        (_produce, (qd, kd, vd, Table, Tiles, table_stride, block_rows, num_items, qs, ks, vs, qbar, kbar, vbar,
                    HK, G, D, BN, BLOCK, BOX, ST, QST, WINDOW)),
    ], [4, 1], [240, 24])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """Tiles of triton_plan with their count on the device, and how many there can be."""

    tiles: Tensor
    count: Tensor
    max_tiles: int


def supports(shape: AttentionShape, gpu: Gpu | None) -> bool:
    """Whether the kernel takes this shape on this GPU: Hopper, head size 128, 64 rows in whole groups, 2 bytes.

    An fp8 pool would have to be widened between the ring and the matrix units: it takes the plain kernel, and so do
    first positions that are kept behind a window.
    """
    return (
        gpu is not None
        and gpu.capability[0] == 9
        and shape.head_dim == 128
        and 64 % shape.group == 0
        and shape.dtype in (torch.bfloat16, torch.float16)
        and not shape.is_fp8
        and not shape.keep_first
    )


def launch(
    shape: AttentionShape, q: Tensor, kv: KvLayer, table: Tensor, work: Work, spec: AttnSpec, out: Tensor,
    lse: Tensor | None,
) -> None:  # fmt: skip
    """Attend the prefill tiles of `work`; the arguments are those of Attention.forward."""
    group, dim, kv_heads = shape.group, shape.head_dim, shape.num_kv_heads
    box = min(kv.block_size, TILE)
    flat = gl.NVMMASharedLayout(128, 16, rank=2)
    q_desc = TensorDescriptor(q, list(q.shape), list(q.stride()), [64 // group, group, dim],
                              gl.NVMMASharedLayout(128, 16, rank=3))  # fmt: skip
    block_rows = kv.k.stride(0) // dim
    pool_rows = (kv.k.shape[0] - 1) * block_rows + kv_heads * kv.block_size
    k_desc, v_desc = (TensorDescriptor(t, [pool_rows, dim], [dim, 1], [box, dim], flat) for t in (kv.k, kv.v))
    prefill_hopper[(min(MULTIPROCESSORS, work.max_tiles * kv_heads),)](
        q_desc, k_desc, v_desc, out, out if lse is None else lse, q if spec.sinks is None else spec.sinks, table,
        work.tiles, work.count, spec.scale, spec.softcap or 1.0, out.stride(0), table.stride(0), block_rows,
        HK=kv_heads, G=group, D=dim, BN=TILE, BLOCK=kv.block_size, BOX=box, ST=STAGES, QST=Q_STAGES,
        WINDOW=spec.window or 0, SOFTCAP=spec.softcap is not None, SINKS=spec.sinks is not None,
        WANT_LSE=lse is not None, num_warps=4,
    )  # fmt: skip
