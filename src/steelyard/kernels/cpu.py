"""The CPU backend: what torch does fast, arranged so that nothing is done token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steelyard.kernels import cpu_fused, cpu_linear
from steelyard.kernels.attention import Attention
from steelyard.kernels.backend import Fusions, Stored
from steelyard.kernels.cpu_attention import CpuAttention
from steelyard.kernels.cpu_kv import KvWriter
from steelyard.kernels.cpu_layer import LayerFusions
from steelyard.kernels.sampling import Controls, choose
from steelyard.kernels.select import make_attention


class CpuBackend:
    """The Backend protocol on torch's CPU operators."""

    name = "cpu"

    def __init__(self, attention: str = "cpu") -> None:
        """`attention`: a CPU's name of kernels/select.py."""
        writer = KvWriter()
        self.attention: Attention = make_attention(attention, writer)
        self.fusions: Fusions | None = cpu_fused.CpuFusions(writer)
        if isinstance(self.attention, CpuAttention):
            self.fusions = LayerFusions(self.attention, writer)

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        """float32 beside narrow weights: the stream is what every layer's rounding would add up in."""
        return torch.promote_types(weights, torch.float32)

    def kv_dtype(self, weights: torch.dtype) -> torch.dtype:
        """The weights': attention over many queries runs on the same matrix units as products."""
        return weights

    def pack(self, weight: Tensor, stored: Sequence[Stored]) -> cpu_linear.Weight:
        """See Backend.pack."""
        return cpu_linear.pack(weight, stored)

    def linear(self, x: Tensor, weight: cpu_linear.Weight, bias: Tensor | None = None) -> Tensor:
        """See Backend.linear."""
        return cpu_linear.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend.rms_norm."""
        return cpu_fused.rms_norm(x, weight, eps, x.dtype)

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
        return cpu_fused.gated(x, activation)

    def choose(self, logits: Tensor, u: Tensor, controls: Controls) -> Tensor:
        """See Backend.choose."""
        return choose(logits, u, controls)
