"""The linear layer for 2 to 16 tokens on the matrix units, with what surrounds it fused. One token: triton_linear.

K is shared out among the warps of a program (a batched product, summed at its end), so that a program of few weight
rows still has every warp loading: small layers fill the machine without a second pass over partial sums. The first
tile of weights, the whole of K where it fits, is loaded before a program waits for its predecessor. Sums have one
order: results repeat bit for bit and do not depend on how many tokens there are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from steelyard.kernels.triton_act import ACTIVATIONS, activate
from steelyard.kernels.triton_common import early, let_successor_in, wait_for_predecessor
from steelyard.kernels.triton_linear import PLAIN, Fused

MAX_TILE_TOKENS = 16
"""Rows of x in one product of the matrix units."""
MAX_TILE_COLUMNS = 4096
"""The longest rows of a model's matrices for which tiles win: on an H200 by a third at 3,072 and below, and cuBLAS is
the faster at 14,336."""


@triton.jit
def _weight_tile(W, n, k, N, K: tl.constexpr, STEP: tl.constexpr, RAGGED: tl.constexpr):
    """w [SHARES, BN, BK] of rows n [1, BN, 1] and columns k [SHARES, 1, BK]."""
    at = W + n.to(tl.int64) * K + k
    if RAGGED:
        w = tl.load(at, mask=(n < N) & (k < K), other=0.0)
    elif K % STEP == 0:
        w = tl.load(at)
    else:
        w = tl.load(at, mask=k < K, other=0.0)
    return w


@triton.jit
def _x_tile(X, Norm, m, k, num_tokens, squares, K: tl.constexpr, NORM: tl.constexpr):
    """x [SHARES, BM, BK], times the norm's weight, and its sums of squares [SHARES, BM] added to `squares`."""
    x = tl.load(X + m * K + k, mask=(m < num_tokens) & (k < K), other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 2)
        weight = tl.load(Norm + k, mask=k < K, other=0.0).to(tl.float32)
        x = (wide * weight).to(x.dtype)
    return x, squares


@triton.jit(do_not_specialize=["eps", "num_tokens"])
def tile_linear(X, Norm, W, Bias, Y, eps, num_tokens, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, SHARES: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
                RESIDUAL: tl.constexpr, ACT: tl.constexpr, RAGGED: tl.constexpr, EARLY_SIGNAL: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """y = f(x) @ w.T for up to BM tokens, grid (ceil(N / BN)); a tile is SHARES x BK columns, one share a warp.

    NORM, BIAS, RESIDUAL, ACT, EARLY_SIGNAL as in row_linear.
    """
    STEP: tl.constexpr = SHARES * BK
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.arange(0, BM)
    m, n = tokens[None, :, None], rows[None, :, None]
    k = tl.arange(0, SHARES)[:, None, None] * BK + tl.arange(0, BK)[None, None, :]
    if EARLY_SIGNAL:
        let_successor_in(PDL)
    w = _weight_tile(W, n, k, N, K, STEP, RAGGED)
    u = w
    if ACT >= 0:
        u = _weight_tile(W + N.to(tl.int64) * K, n, k, N, K, STEP, RAGGED)
    if not EARLY_SIGNAL:
        let_successor_in(PDL)
    wait_for_predecessor(PDL)
    squares = tl.zeros([SHARES, BM], tl.float32)
    x, squares = _x_tile(X, Norm, m, k, num_tokens, squares, K, NORM)
    acc = tl.dot(x, tl.permute(w, (0, 2, 1)), out_dtype=tl.float32)
    up = acc
    if ACT >= 0:
        up = tl.dot(x, tl.permute(u, (0, 2, 1)), out_dtype=tl.float32)
    for first in tl.range(STEP, K, STEP, num_stages=STAGES):
        w = _weight_tile(W, n, first + k, N, K, STEP, RAGGED)
        x, squares = _x_tile(X, Norm, m, first + k, num_tokens, squares, K, NORM)
        acc = tl.dot(x, tl.permute(w, (0, 2, 1)), acc)
        if ACT >= 0:
            u = _weight_tile(W + N.to(tl.int64) * K, n, first + k, N, K, STEP, RAGGED)
            up = tl.dot(x, tl.permute(u, (0, 2, 1)), up)
    y = tl.sum(acc, 0)
    ok = (tokens < num_tokens)[:, None] & (rows < N)[None, :]
    scale = tl.full([BM], 1.0, tl.float32)
    if NORM:
        scale = tl.math.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= scale[:, None]
    if BIAS:
        y += tl.load(Bias + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    if ACT >= 0:
        ups = tl.sum(up, 0) * scale[:, None]
        if BIAS:
            ups += tl.load(Bias + N + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
        y = activate(y, ACT) * ups
    at = Y + tokens[:, None] * N + rows[None, :]
    if RESIDUAL:
        y += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    tl.store(at, y.to(Y.dtype.element_ty), mask=ok)


@dataclass(frozen=True, slots=True)
class Tiles:
    """rows: weight rows of a program; columns: of one warp's share of a tile; stages of the loop over tiles."""

    rows: int
    columns: int
    warps: int
    stages: int = 4


def tiles_for(n: int, k: int, gated: bool) -> Tiles:
    """The tiles of a product, by what fills an H200 with loads and stays in the registers: few rows a program where
    there are few, and K whole, before the wait, where it is short."""
    if k > 2048:
        return Tiles(rows=8, columns=256, warps=4) if n <= 2048 else Tiles(rows=16, columns=64, warps=8)
    warps = 4 if k <= 1024 else 8
    return Tiles(rows=8 if n <= 2048 or (gated and warps == 8) else 16, columns=256, warps=warps)


def tile_products(
    x: Tensor, weight: Tensor, out: Tensor, fused: Fused = PLAIN, pdl: bool = False, tiles: Tiles | None = None
) -> Tensor:
    """out [T, N] = f(x [T, K]) @ weight.T in bfloat16, T at most MAX_TILE_TOKENS; all contiguous.

    A norm's weight multiplies x before its scale is known: float16 would have to hold numbers of the stream itself.
    weight [N, K], or [2 N, K] (gates, then ups) with an activation. `tiles` None: tiles_for's.
    """
    (num_tokens, n), k = out.shape, weight.shape[1]
    gated = fused.activation is not None
    assert x.shape == (num_tokens, k) and weight.shape[0] == (2 * n if gated else n)
    assert weight.is_contiguous() and x.is_contiguous() and out.is_contiguous()
    assert 1 <= num_tokens <= MAX_TILE_TOKENS
    chosen = tiles or tiles_for(n, k, gated)
    norm, eps = fused.norm or (x, 0.0)
    tile_linear[(-(-n // chosen.rows),)](
        x, norm, weight, x if fused.bias is None else fused.bias, out, eps, num_tokens, n, K=k, BM=MAX_TILE_TOKENS,
        BN=chosen.rows, BK=chosen.columns, SHARES=chosen.warps, STAGES=chosen.stages, NORM=fused.norm is not None,
        BIAS=fused.bias is not None, RESIDUAL=fused.residual,
        ACT=ACTIVATIONS[fused.activation] if fused.activation else -1, RAGGED=n % chosen.rows != 0,
        EARLY_SIGNAL=weight.numel() * 2 > 16 << 20, PDL=pdl, num_warps=chosen.warps, **early(pdl),
    )  # fmt: skip
    return out
