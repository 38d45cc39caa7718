"""The CPU backend: what torch does fast, arranged so that nothing is done token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.kernels import cpu_linear
from steelyard.kernels.attention import Attention
from steelyard.kernels.backend import Fusions, Stored
from steelyard.kernels.cpu_attention import CpuAttention
from steelyard.kernels.sampling import Controls, choose


class CpuBackend:
    """The Backend protocol on torch's CPU operators."""

    name = "cpu"
    fusions: Fusions | None = None

    def __init__(self) -> None:
        self.attention: Attention = CpuAttention()

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        """float32 beside narrow weights: only products gain from 16 bits here, every other operator loses."""
        return torch.promote_types(weights, torch.float32)

    def pack(self, weight: Tensor, stored: Sequence[Stored]) -> cpu_linear.Weight:
        """See Backend.pack."""
        return cpu_linear.pack(weight, stored)

    def linear(self, x: Tensor, weight: cpu_linear.Weight, bias: Tensor | None = None) -> Tensor:
        """See Backend.linear."""
        return cpu_linear.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend.rms_norm."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        # A norm and a scalar division are three passes in few operators; F.rms_norm takes three times as long here.
        scale = torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + eps)
        return (wide * scale).mul_(weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Backend.add_rms_norm."""
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def rotate(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """See Backend.rotate."""
        half = cos_sin.shape[-1] // 2
        cos, sin = cos_sin[:, None, :half].to(x.dtype), cos_sin[:, None, half:].to(x.dtype)
        out = torch.empty(x.shape, dtype=x.dtype)
        low, high = x[..., :half], x[..., half : 2 * half]
        torch.sub(low * cos, high * sin, out=out[..., :half])
        torch.add(high * cos, low * sin, out=out[..., half : 2 * half])
        if 2 * half < x.shape[-1]:
            out[..., 2 * half :] = x[..., 2 * half :]
        return out

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """See Backend.gated."""
        gate, up = x.chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate).mul_(up)
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return functional.gelu(gate, approximate=approximate).mul_(up)

    def choose(self, logits: Tensor, u: Tensor, controls: Controls) -> Tensor:
        """See Backend.choose."""
        return choose(logits, u, controls)
