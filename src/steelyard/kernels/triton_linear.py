"""The linear layer for one token (GEMV), where cuBLAS leaves bandwidth, with what surrounds it fused.

Multiply-add on the ordinary units; all weights of a program are loaded before it waits for its predecessor. On an H200
it beats cuBLAS on every shape measured (1.06 to 5 times). From 2 rows on cuBLAS reads lm_head at the memory's rate
and is equal or better elsewhere.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from steelyard.kernels.triton_act import ACTIVATIONS, activate
from steelyard.kernels.triton_common import early, let_successor_in, power_of_two, wait_for_predecessor


@triton.jit
def _weights(W, n, k, N, K: tl.constexpr, BK: tl.constexpr, RAGGED: tl.constexpr):
    """Rows n and all of K of w [N, K]."""
    at = W + n.to(tl.int64)[:, None] * K + k[None, :]
    if RAGGED:
        w = tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    elif BK == K:
        w = tl.load(at)
    else:
        w = tl.load(at, mask=(k < K)[None, :], other=0.0)
    return w


@triton.jit(do_not_specialize=["eps"])
def row_linear(X, Norm, W, Bias, Y, eps, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
               BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr, RAGGED: tl.constexpr,
               EARLY_SIGNAL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One token: y = w @ f(x), grid (ceil(N / BN)), the whole of K in one tile so that every load is in flight.

    NORM: f is an RMSNorm with weight Norm; its scale is applied to the sums. ACT >= 0: w (and Bias) has 2 N rows, gates
    then ups, and y = act(gate) * up. RESIDUAL: added to what Y holds. EARLY_SIGNAL: the successor may start at once
    (many waves of programs), else only after this program's weight loads are issued (one wave).
    """
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    ok = k < K
    if EARLY_SIGNAL:
        let_successor_in(PDL)
    w = _weights(W, n, k, N, K, BK, RAGGED)
    u = w
    if ACT >= 0:
        u = _weights(W + N.to(tl.int64) * K, n, k, N, K, BK, RAGGED)
    weight = tl.zeros([BK], tl.float32)
    if NORM:
        weight = tl.load(Norm + k, mask=ok, other=0.0).to(tl.float32)
    if not EARLY_SIGNAL:
        let_successor_in(PDL)
    wait_for_predecessor(PDL)
    x = tl.load(X + k, mask=ok, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = tl.math.rsqrt(tl.sum(x * x, 0) / K + eps)
        x = x * weight
    y = tl.sum(w.to(tl.float32) * x[None, :], 1) * scale
    if BIAS:
        y += tl.load(Bias + n, mask=n < N, other=0.0).to(tl.float32)
    if ACT >= 0:
        up = tl.sum(u.to(tl.float32) * x[None, :], 1) * scale
        if BIAS:
            up += tl.load(Bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        y = activate(y, ACT) * up
    if RESIDUAL:
        y += tl.load(Y + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Y + n, y.to(Y.dtype.element_ty), mask=n < N)


@dataclass(frozen=True, slots=True)
class Fused:
    """What row_linear does around the product: norm (weight, eps) before, bias, an activation of gates, a residual."""

    norm: tuple[Tensor, float] | None = None
    bias: Tensor | None = None
    activation: str | None = None
    residual: bool = False


PLAIN = Fused()
MAX_GEMV_COLUMNS = 32768
"""The widest K that fits one tile of row_linear."""


def rows_per_program(n: int, k: int, gated: bool) -> int:
    """Weight rows of one GEMV program: 16k elements of loads in flight for small layers, fewer rows when K is long."""
    rows = max(1, min(16, (32768 if k <= 2048 else 16384) // power_of_two(k)))
    return max(1, rows // 2) if gated else rows


def gemv(x: Tensor, weight: Tensor, out: Tensor, fused: Fused = PLAIN, pdl: bool = False) -> Tensor:
    """out [1, N] = f(x [1, K]) @ weight.T; weight [N, K], or [2 N, K] (gates, then ups) with an activation."""
    n, k = out.shape[-1], weight.shape[1]
    gated = fused.activation is not None
    assert x.numel() == k and out.numel() == n and weight.shape[0] == (2 * n if gated else n)
    assert weight.is_contiguous() and k <= MAX_GEMV_COLUMNS
    rows = rows_per_program(n, k, gated)
    block = power_of_two(k)
    elements = rows * block * (2 if gated else 1)
    norm, eps = fused.norm or (x, 0.0)
    row_linear[(-(-n // rows),)](
        x, norm, weight, x if fused.bias is None else fused.bias, out, eps, n, K=k, BN=rows, BK=block,
        NORM=fused.norm is not None, BIAS=fused.bias is not None, RESIDUAL=fused.residual,
        ACT=ACTIVATIONS[fused.activation] if fused.activation else -1, RAGGED=n % rows != 0,
        EARLY_SIGNAL=weight.numel() * 2 > 16 << 20, PDL=pdl, num_warps=4 if elements <= 16384 else 8, **early(pdl),
    )  # fmt: skip
    return out
