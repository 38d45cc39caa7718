"""Per-head q/k norm, rotary embedding and the write of K and V into the pool, in one pass over a packed QKV row.

    qkv row   | q heads (Hq) | k heads (Hkv) | v heads (Hkv) |      q, k are rewritten in place,
                                                                    k and v also go to slot `slots[t]`

Halves form of the rotary embedding (Su et al. 2021): dimension i turns with i + rot / 2. V is written finite, as the
pool demands.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from steelyard.kernels.attention import KvLayer
from steelyard.kernels.triton_common import (
    early,
    hadamard,
    let_successor_in,
    power_of_two,
    to_stored,
    wait_for_predecessor,
)


@triton.jit
def _finite(x):
    """x with NaN and infinities as 0."""
    return tl.where(tl.abs(x.to(tl.float32)) <= 3.0e38, x, 0.0)


@triton.jit(do_not_specialize=["qkv_stride"])
def rope_kv(QKV, QNorm, KNorm, CosSin, Positions, K, V, KScale, VScale, Slots, eps, qkv_stride, block_stride,
            HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr,
            DP: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, WRITE: tl.constexpr,
            BY_POSITION: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (T, ceil((HQ + 2 HK) / HB)): HB heads of one token, each in two halves of DB columns.

    Columns: ROT / 2 pairs (i, i + ROT / 2), then the rest D - ROT passes through in a third piece. CosSin float32
    [*, ROT], indexed by position (BY_POSITION) or by token. Slot -1 writes nothing. SCALED: the pool is fp8, and keys
    go into it in its basis, which takes a head in one piece of DP columns.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    HALF: tl.constexpr = ROT // 2
    i = tl.arange(0, DB)
    slot = tl.load(Slots + t)
    angle = t
    if BY_POSITION:
        angle = tl.load(Positions + t)
    pair = i < HALF
    cos = tl.load(CosSin + angle * ROT + i, mask=pair, other=1.0)
    sin = tl.load(CosSin + angle * ROT + HALF + i, mask=pair, other=0.0)
    wait_for_predecessor(PDL)
    let_successor_in(PDL)
    turns = h < HQ + HK
    live = (h < HQ + 2 * HK)[:, None]
    at = QKV + t * qkv_stride + h[:, None] * D + i[None, :]
    is_pair, is_rest = live & pair[None, :], live & (i < D - ROT)[None, :]
    low_in = tl.load(at, mask=is_pair, other=0.0)
    high_in = tl.load(at + HALF, mask=is_pair, other=0.0)
    low, high = low_in.to(tl.float32), high_in.to(tl.float32)
    rest_in = low_in
    rest = low
    if ROT < D:
        rest_in = tl.load(at + ROT, mask=is_rest, other=0.0)
        rest = rest_in.to(tl.float32)
    if NORM:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if ROT < D:
            square += tl.sum(rest * rest, 1)
        scale = tl.math.rsqrt(square / D + eps)[:, None]
        is_q = (h < HQ)[:, None]
        low = low * scale * _norm_weight(QNorm, KNorm, i, is_q, pair)
        high = high * scale * _norm_weight(QNorm, KNorm, HALF + i, is_q, pair)
        if ROT < D:
            rest = rest * scale * _norm_weight(QNorm, KNorm, ROT + i, is_q, i < D - ROT)
    dtype = QKV.dtype.element_ty
    new_low = (low * cos[None, :] - high * sin[None, :]).to(dtype)
    new_high = (high * cos[None, :] + low * sin[None, :]).to(dtype)
    is_qk = turns[:, None]
    tl.store(at, new_low, mask=is_pair & is_qk)
    tl.store(at + HALF, new_high, mask=is_pair & is_qk)
    if ROT < D and NORM:
        tl.store(at + ROT, rest.to(dtype), mask=is_rest & is_qk)
    if WRITE:
        kv_head = tl.where(turns, h - HQ, h - HQ - HK)
        base = slot // BLOCK * block_stride + kv_head.to(tl.int64) * (BLOCK * D) + slot % BLOCK * D
        to = base[:, None] + i[None, :]
        is_k = ((h >= HQ) & turns)[:, None] & (slot >= 0)
        is_v = (live & ~turns[:, None]) & (slot >= 0)
        kt: tl.constexpr = K.dtype.element_ty
        ks = _head_scale(KScale, kv_head, is_k, SCALED)
        vs = _head_scale(VScale, kv_head, is_v, SCALED)
        if not SCALED:
            tl.store(K + to, new_low.to(kt), mask=is_k & is_pair)
            tl.store(K + to + HALF, new_high.to(kt), mask=is_k & is_pair)
        tl.store(V + to, to_stored(_finite(low_in), vs, kt, SCALED), mask=is_v & is_pair)
        tl.store(V + to + HALF, to_stored(_finite(high_in), vs, kt, SCALED), mask=is_v & is_pair)
        if ROT < D:
            if not SCALED:
                tl.store(K + to + ROT, rest.to(dtype).to(kt), mask=is_k & is_rest)
            tl.store(V + to + ROT, to_stored(_finite(rest_in), vs, kt, SCALED), mask=is_v & is_rest)
        if SCALED:
            first = tl.program_id(1) * HB
            if (first + HB > HQ) & (first < HQ + HK):
                tl.debug_barrier()  # what other threads of the program have turned is read again, as whole heads
                d = tl.arange(0, DP)
                ok = is_k & (d < D)[None, :]
                whole = tl.load(QKV + t * qkv_stride + h[:, None] * D + d[None, :], mask=ok, other=0.0)
                tl.store(K + base[:, None] + d[None, :], _key_stored(whole, ks, D, kt, SCALED), mask=ok)


@triton.jit
def _key_stored(k, scale, D: tl.constexpr, dtype: tl.constexpr, SCALED: tl.constexpr):
    """Keys [H, DP] as a pool of `dtype` holds them; columns from D on are 0."""
    y = k
    if SCALED:
        y = hadamard(k.to(tl.float32), D)
    return to_stored(y, scale, dtype, SCALED)


@triton.jit
def _head_scale(Scale, head, ok, SCALED: tl.constexpr):
    """Scales of heads, float32 [H, 1]; 1 where the pool has none."""
    scale = tl.full(ok.shape, 1.0, tl.float32)
    if SCALED:
        scale = tl.load(Scale + head[:, None], mask=ok, other=1.0)
    return scale


@triton.jit
def _norm_weight(QNorm, KNorm, at, is_q, ok):
    q = tl.load(QNorm + at, mask=ok, other=0.0).to(tl.float32)[None, :]
    k = tl.load(KNorm + at, mask=ok, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_q, q, k)


@triton.jit(do_not_specialize=["k_stride", "v_stride"])
def kv_write(NewK, NewV, K, V, KScale, VScale, Slots, k_stride, v_stride, block_stride, HK: tl.constexpr,
             D: tl.constexpr, HB: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
             PDL: tl.constexpr):  # fmt: skip
    """Grid (T): one token's K and V [HK, D] to its slot; -1 writes nothing."""
    t = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HB), tl.arange(0, DP)
    slot = tl.load(Slots + t)
    wait_for_predecessor(PDL)
    let_successor_in(PDL)
    ok = (h < HK)[:, None] & (d < D)[None, :] & (slot >= 0)
    of = h[:, None] * D + d[None, :]
    to = slot // BLOCK * block_stride + h.to(tl.int64)[:, None] * (BLOCK * D) + slot % BLOCK * D + d[None, :]
    is_head = (h < HK)[:, None]
    k = tl.load(NewK + t * k_stride + of, mask=ok, other=0.0)
    k = _key_stored(k, _head_scale(KScale, h, is_head, SCALED), D, K.dtype.element_ty, SCALED)
    tl.store(K + to, k, mask=ok)
    v = tl.load(NewV + t * v_stride + of, mask=ok, other=0.0)
    v = to_stored(_finite(v), _head_scale(VScale, h, is_head, SCALED), V.dtype.element_ty, SCALED)
    tl.store(V + to, v, mask=ok)


def scales_or(kv: KvLayer, other: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's scales, or `other` for arguments that no kernel reads without them."""
    if kv.k_scale is None or kv.v_scale is None:
        return other, other
    return kv.k_scale, kv.v_scale


def write_kv(k: Tensor, v: Tensor, kv: KvLayer, slots: Tensor, pdl: bool = False) -> None:
    """k, v [T, Hkv, D] (rows may be strided) into the pool at slots int64 [T]; slot -1 is not written."""
    num_tokens, num_heads, dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (dim, 1) and kv.k.stride() == kv.v.stride()
    kv_write[(num_tokens,)](
        k, v, kv.k, kv.v, *scales_or(kv, k), slots, k.stride(0), v.stride(0), kv.k.stride(0), HK=num_heads, D=dim,
        HB=power_of_two(num_heads), DP=power_of_two(dim), BLOCK=kv.block_size, SCALED=kv.k_scale is not None,
        PDL=pdl, num_warps=4, **early(pdl),
    )  # fmt: skip


def qk_norm_rope_write(
    qkv: Tensor,
    heads: tuple[int, int, int],
    cos_sin: Tensor,
    positions: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    kv: tuple[KvLayer, Tensor] | None = None,
    pdl: bool = False,
) -> None:
    """Norm and turn q and k of qkv [T, (Hq + 2 Hkv) D] in place; with kv = (layer, slots) also write K and V.

    heads      (Hq, Hkv, D)
    cos_sin    float32 [max position, rot] if positions int64 [T] are given, else [T, rot]
    norm       (q weight [D], k weight [D], eps), an RMSNorm of each head before the turn; None: off
    """
    hq, hk, dim = heads
    rot = cos_sin.shape[-1]
    total = hq + 2 * hk
    assert qkv.shape[-1] == total * dim and qkv.stride(-1) == 1 and rot % 2 == 0 and rot <= dim
    num_tokens = qkv.shape[0]
    few = num_tokens < 64
    hb = min(4 if few else 16, power_of_two(total))
    q_norm, k_norm, eps = norm or (cos_sin, cos_sin, 0.0)
    layer, slots = kv or (KvLayer(qkv, qkv, 1), cos_sin)
    at = cos_sin if positions is None else positions
    if kv is None:
        slots = at
    rope_kv[(num_tokens, -(-total // hb))](
        qkv, q_norm, k_norm, cos_sin, at, layer.k, layer.v, *scales_or(layer, qkv), slots, eps, qkv.stride(0),
        layer.k.stride(0), HQ=hq, HK=hk, D=dim, ROT=rot, HB=hb, DB=power_of_two(max(rot // 2, dim - rot)),
        DP=power_of_two(dim), BLOCK=layer.block_size, NORM=norm is not None, WRITE=kv is not None,
        BY_POSITION=positions is not None, SCALED=layer.k_scale is not None, PDL=pdl, num_warps=4, **early(pdl),
    )  # fmt: skip
