"""The Backend protocol on CUDA: our Triton kernels around cuBLAS. No kernel here.

One token goes through our GEMV, which reads weights faster than cuBLAS; more tokens through cuBLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.kernels.attention import Attention
from steelyard.kernels.sampling import Controls
from steelyard.kernels.triton_act import gated
from steelyard.kernels.triton_linear import MAX_GEMV_COLUMNS, Fused, gemv
from steelyard.kernels.triton_norm import rms_norm
from steelyard.kernels.triton_rope_kv import qk_norm_rope_write
from steelyard.kernels.triton_sample import Cut, Sampler


class TritonBackend:
    """Operators for steps of up to max_rows sampled rows. `pdl` only where every kernel around keeps its rules."""

    name = "triton"

    def __init__(self, attention: Attention, max_rows: int, device: torch.device) -> None:
        self.attention = attention
        self._sampler = Sampler(max_rows, device)
        ones = torch.ones(max_rows, dtype=torch.float32, device=device)
        self._uncut = Cut(ones.int() * 0, ones, ones * 0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Backend.linear."""
        if x.shape[0] == 1 and weight.shape[1] <= MAX_GEMV_COLUMNS and weight.is_contiguous():
            return gemv(x, weight, x.new_empty(1, weight.shape[0]), Fused(bias=bias))
        return functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend.rms_norm."""
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, weight, eps, rows.new_empty(rows.shape)).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Backend.add_rms_norm."""
        return rms_norm(x, weight, eps, torch.empty_like(residual), residual), residual

    def rotate(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """See Backend.rotate; in place."""
        qk_norm_rope_write(x.flatten(1), (x.shape[1], 0, x.shape[2]), cos_sin)
        return x

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """See Backend.gated."""
        return gated(x, activation, x.new_empty(x.shape[0], x.shape[1] // 2))

    def choose(self, logits: Tensor, u: Tensor, controls: Controls) -> Tensor:
        """See Backend.choose; u a multiple of 2^-32."""
        num_rows, uncut = logits.shape[0], self._uncut
        cut = None
        if controls.top_k is not None or controls.top_p is not None or controls.min_p is not None:
            cut = Cut(
                uncut.top_k[:num_rows] if controls.top_k is None else controls.top_k,
                uncut.top_p[:num_rows] if controls.top_p is None else controls.top_p,
                uncut.min_p[:num_rows] if controls.min_p is None else controls.min_p,
            )
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        return self._sampler(logits, u, controls.temperature, cut, out)
