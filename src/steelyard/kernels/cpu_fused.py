"""A layer's products on a CPU with what surrounds them: norm before, gate after, residual added. No attention here.

    stream float32 --norm--> narrow --product--> narrow --gate or heads--> narrow --product--> added to the stream

Between the norm and the addition everything stays in the weights' dtype, so nothing is widened only to be rounded
again; sums inside a norm, a product and a rotation are float32. Under float32 weights nothing is ever rounded.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.kernels import cpu_linear
from steelyard.kernels.attention import KvLayer
from steelyard.kernels.cpu_kv import KvWriter


@cache
def zero() -> Tensor:
    """float32 [], for operators that add to something."""
    return torch.zeros(())


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """norm(x [..., N]) in `dtype`; see Backend.rms_norm."""
    if x.numel() == x.shape[-1] and x.dtype == weight.dtype == torch.float32 and eps > 0:
        return cpu_linear.cast(norm_of_one(x, weight, eps), dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = size.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(dtype)


def norm_of_one(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """The same for a single float32 row [1, N], whose size is a number of the host; rounded where `out` is narrower."""
    flat = x.view(-1)
    mean_square: float = torch.dot(flat, flat).item() / x.numel()
    return torch.addcmul(zero(), x, weight, value=(mean_square + eps) ** -0.5, out=out)


def gated(x: Tensor, activation: str) -> Tensor:
    """See Backend.gated."""
    gate, up = x.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return functional.gelu(gate, approximate=approximate).mul_(up)


class CpuFusions:
    """The Fusions protocol. Rotary rows arranged for `turn_and_write` are kept as long as the same ones are given."""

    def __init__(self, writer: KvWriter) -> None:
        self._writer = writer
        self._turns: tuple[Tensor, Tensor, Tensor] | None = None

    def takes(self, stream: Tensor, num_inputs: int) -> bool:
        """Always: there is no size at which operators that stand alone are faster."""
        return True

    def product(
        self,
        x: Tensor,
        weight: cpu_linear.Weight,
        *,
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
        activation: str | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """See Fusions.product; a result that is not added is in the weight's dtype."""
        if norm is not None:
            x = rms_norm(x, *norm, cpu_linear.dtype_of(weight))
        found = cpu_linear.product(x, weight, bias)
        if activation is not None:
            found = gated(found, activation)
        return found if add_to is None else add_to.add_(found)

    def turn_and_write(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        cos_sin: Tensor,
        norm: tuple[Tensor, Tensor, float] | None,
        kv: KvLayer,
        slots: Tensor,
    ) -> None:
        """See Fusions.turn_and_write."""
        num_q, num_kv, dim = heads
        packed = qkv.view(qkv.shape[0], -1, dim)
        turned = packed.narrow(1, 0, num_q + num_kv)
        if norm is not None:
            q_weight, k_weight, eps = norm
            packed[:, :num_q] = rms_norm(packed[:, :num_q], q_weight, eps, qkv.dtype)
            packed[:, num_q : num_q + num_kv] = rms_norm(packed[:, num_q : num_q + num_kv], k_weight, eps, qkv.dtype)
        self._turn(turned, cos_sin)
        self._writer.write(packed.narrow(1, num_q, 2 * num_kv), kv, slots)

    def _turn(self, x: Tensor, cos_sin: Tensor) -> None:
        """Rotate x [T, H, D] in place: x * (cos, cos) + (second half, first half) * (-sin, sin)."""
        if self._turns is None or self._turns[0] is not cos_sin:
            cos, sin = cos_sin[:, None].chunk(2, dim=-1)
            self._turns = (cos_sin, torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
        _, cos, sin = self._turns
        part = x[..., : cos.shape[-1]]
        swapped = part.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        wide = part * cos
        part.copy_(wide.addcmul_(swapped.to(wide.dtype), sin.to(wide.dtype)))

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[Tensor, Tensor, str]) -> Tensor:
        """See Fusions.experts: tokens sorted by expert, one run of them at a time through those that were chosen."""
        gate_up, down, activation = matrices
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=gate_up.shape[0]).tolist()
        token = order // chosen.shape[1]
        sorted_x = x.to(gate_up.dtype)[token]
        out = torch.zeros_like(x)
        scale = weights.flatten()[order, None]
        first = 0
        for expert, count in enumerate(counts):
            if count:
                run = slice(first, first + count)
                inner = gated(functional.linear(sorted_x[run], gate_up[expert]), activation)
                out.index_add_(0, token[run], functional.linear(inner, down[expert]) * scale[run])
                first += count
        return out
