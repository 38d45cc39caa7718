"""act(gate) * up over the two halves of a row, and the gather of embedding rows. Elementwise kernels."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from steelyard.kernels.triton_common import LOG2E, early, let_successor_in, power_of_two, wait_for_predecessor

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


@triton.jit
def activate(x, ACT: tl.constexpr):
    """silu, tanh GELU or exact GELU of float32 x, by ACTIVATIONS' number."""
    if ACT == 0:
        y = x / (1.0 + tl.math.exp2(-LOG2E * x))
    elif ACT == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * (1.0 - 1.0 / (1.0 + tl.math.exp2(2.0 * LOG2E * inner)))
    else:
        y = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    return y


@triton.jit
def gated_rows(X, Out, F, BLOCK: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr):
    """Grid (T, ceil(F / BLOCK)): Out [T, F] from X [T, 2 F]."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < F
    wait_for_predecessor(PDL)
    let_successor_in(PDL)
    at = X + row * (2 * F) + i
    gate = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=ok, other=0.0).to(tl.float32)
    tl.store(Out + row * F + i, (activate(gate, ACT) * up).to(Out.dtype.element_ty), mask=ok)


def gated(x: Tensor, activation: str, out: Tensor, pdl: bool = False) -> Tensor:
    """out [T, F] = act(x[:, :F]) * x[:, F:] for contiguous x [T, 2 F]; activation: silu, gelu_tanh or gelu."""
    num_rows, size = out.shape
    assert x.shape == (num_rows, 2 * size) and x.is_contiguous() and out.is_contiguous()
    block = min(1024, power_of_two(size))
    gated_rows[(num_rows, -(-size // block))](
        x, out, size, BLOCK=block, ACT=ACTIVATIONS[activation], PDL=pdl, num_warps=4, **early(pdl)
    )
    return out


@triton.jit
def embed_rows(Ids, Table, Out, scale, K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T). Never starts early: it is the kernel after the step's tables (see triton_common)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source = tl.load(Ids + row).to(tl.int64)
    x = tl.load(Table + source * K + i, mask=i < K, other=0.0)
    tl.store(Out + row * K + i, (x.to(tl.float32) * scale).to(Out.dtype.element_ty), mask=i < K)


def embed(ids: Tensor, table: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    """out [T, K] = table[ids] * scale, for ids [T] of any integer dtype and table [V, K]."""
    k = table.shape[1]
    assert table.is_contiguous() and out.is_contiguous()
    block = power_of_two(k)
    embed_rows[(ids.shape[0],)](ids, table, out, scale, K=k, BLOCK=block, num_warps=4 if block <= 2048 else 8)
    return out
