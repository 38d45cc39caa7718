"""The Backend protocol on CUDA: our Triton kernels around cuBLAS. No kernel here.

Products take norm, activation and residual with them and start early: one token's through our GEMV, which reads weights
faster than cuBLAS; those of a few tokens, in models of short rows, through tiles. More tokens go through cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.kernels.attention import Attention, KvLayer
from steelyard.kernels.backend import Fusions, Stored
from steelyard.kernels.sampling import Controls
from steelyard.kernels.triton_act import gated
from steelyard.kernels.triton_linear import MAX_GEMV_COLUMNS, Fused, gemv
from steelyard.kernels.triton_moe import ExpertLayer, ExpertWeights
from steelyard.kernels.triton_norm import rms_norm
from steelyard.kernels.triton_rope_kv import qk_norm_rope_write
from steelyard.kernels.triton_sample import Cut, Sampler
from steelyard.kernels.triton_tiles_linear import MAX_TILE_COLUMNS, MAX_TILE_TOKENS, tile_products


class TritonFusions:
    """The Fusions protocol. `pdl`: kernels of a step of few tokens start early (see triton_common)."""

    def __init__(self, max_tokens: int, pdl: bool) -> None:
        self._max_tokens = max_tokens
        self._pdl = pdl
        self._experts: ExpertLayer | None = None

    def takes(self, stream: Tensor, num_inputs: int) -> bool:
        """See Fusions.takes."""
        if len(stream) == 1:
            return num_inputs <= MAX_GEMV_COLUMNS
        fits = len(stream) <= MAX_TILE_TOKENS and num_inputs <= MAX_TILE_COLUMNS
        return fits and stream.dtype == torch.bfloat16

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
        activation: str | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """See Fusions.product."""
        num_out = weight.shape[0] // (2 if activation else 1)
        out = torch.empty(len(x), num_out, dtype=x.dtype, device=x.device) if add_to is None else add_to
        around = Fused(norm=norm, bias=bias, activation=activation, residual=add_to is not None)
        return (gemv if len(x) == 1 else tile_products)(x, weight, out, around, self._pdl)

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
        pdl = self._pdl and len(qkv) <= MAX_TILE_TOKENS
        qk_norm_rope_write(qkv, heads, cos_sin, norm=norm, kv=(kv, slots), pdl=pdl)

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[Tensor, Tensor, str]) -> Tensor:
        """See Fusions.experts."""
        own = ExpertWeights(*matrices)
        if self._experts is None:
            self._experts = ExpertLayer(own, self._max_tokens, chosen.shape[1])
        return self._experts(x, chosen.to(torch.int32), weights, own, torch.empty_like(x))


class TritonBackend:
    """The Backend protocol on CUDA (and, for tests, in Triton's interpreter), for steps of up to max_rows sampled rows.

    max_tokens bounds a step where a model has experts: their scratch is allocated once. `pdl` lets the kernels of a
    step of few tokens start early, which the attention must have been built for too.
    """

    name = "triton"

    def __init__(
        self, attention: Attention, max_rows: int, device: torch.device, *, max_tokens: int = 0, pdl: bool = False
    ) -> None:
        self.attention = attention
        self.fusions: Fusions | None = TritonFusions(max_tokens, pdl)
        self._pdl = pdl
        self._sampler = Sampler(max_rows, device)
        ones = torch.ones(max_rows, dtype=torch.float32, device=device)
        self._uncut = Cut(torch.zeros_like(ones, dtype=torch.int32), ones, torch.zeros_like(ones))

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        """See Backend.activation_dtype."""
        return weights

    def kv_dtype(self, weights: torch.dtype) -> torch.dtype:
        """See Backend.kv_dtype."""
        return weights

    def pack(self, weight: Tensor, stored: Sequence[Stored]) -> Tensor:
        """See Backend.pack."""
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Backend.linear."""
        if x.shape[0] == 1 and x.is_contiguous() and weight.shape[1] <= MAX_GEMV_COLUMNS:
            out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
            return gemv(x, weight, out, Fused(bias=bias), self._pdl)
        return functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend.rms_norm."""
        flat = x.reshape(-1, x.shape[-1])
        return rms_norm(flat, weight, eps, torch.empty_like(flat, memory_format=torch.contiguous_format)).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Backend.add_rms_norm."""
        return rms_norm(x, weight, eps, torch.empty_like(residual), residual), residual

    def rotate(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """See Backend.rotate."""
        whole = x.contiguous()
        qk_norm_rope_write(whole.flatten(1), (x.shape[1], 0, x.shape[2]), cos_sin)
        return whole

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """See Backend.gated."""
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        return gated(x, activation, out)

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
