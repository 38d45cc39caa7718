"""RMSNorm, with or without the residual addition before it. One row a program, float32 inside.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from steelyard.kernels.triton_common import early, let_successor_in, power_of_two, wait_for_predecessor


@triton.jit(do_not_specialize=["x_stride"])
def rms_norm_rows(X, Residual, Weight, Out, eps, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Grid (T). ADD: Residual += X first, rounded to its dtype, and that is what is normed."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ok = i < K
    weight = tl.load(Weight + i, mask=ok, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    let_successor_in(PDL)
    x = tl.load(X + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        total = x + tl.load(Residual + row * K + i, mask=ok, other=0.0).to(tl.float32)
        rounded = total.to(Residual.dtype.element_ty)
        tl.store(Residual + row * K + i, rounded, mask=ok)
        x = rounded.to(tl.float32)
    y = x * tl.math.rsqrt(tl.sum(x * x, 0) / K + eps) * weight
    tl.store(Out + row * K + i, y.to(Out.dtype.element_ty), mask=ok)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """out [T, K] = RMSNorm(x) * weight; with a residual [T, K] (in place) residual += x, out = RMSNorm(residual).

    x [T, K] may have a row stride; out and residual are contiguous; weight [K] of any float dtype.
    """
    num_rows, k = x.shape
    assert x.stride(1) == 1 and out.is_contiguous() and (residual is None or residual.is_contiguous())
    block = power_of_two(k)
    warps = 4 if block <= 2048 else 8 if block <= 8192 else 16
    rms_norm_rows[(num_rows,)](
        x, x if residual is None else residual, weight, out, eps, x.stride(0), K=k, BLOCK=block,
        ADD=residual is not None, PDL=pdl, num_warps=warps, **early(pdl),
    )  # fmt: skip
    return out
