"""The operators a model is made of, as one protocol per device. No kernel here, and no choice of one.

decoder --> Backend.linear, rms_norm, rotate, gated ...   one object a device, given to every layer
            Backend.attention                             the seam of attention.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from steelyard.kernels.attention import Attention, AttnSpec, Batch, KvLayer
from steelyard.kernels.sampling import Controls

Weight: TypeAlias = Any
"""A tensor, or what the same backend's `pack` made of it: an object with `tensors`, all that it holds."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint holds some rows of a weight.

    kind    "F32", "BF16", "Q4_1", ...
    bits    of a level, 4 to 8; 0: the kind has no levels in groups of 32 along K
    levels  read when called: (levels uint8 [N, K], step float32 [N, K / 32], low float32 [N, K / 32]),
            weight = level * step + low
    """

    kind: str
    bits: int = 0
    levels: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None


class Fusions(Protocol):
    """Operators that a device backend has in one kernel; the stream of hidden states is updated in place."""

    def takes(self, stream: Tensor, num_inputs: int) -> bool:
        """Whether `product` is the faster way for a stream [T, hidden] and matrices of up to so many columns; else
        products stand alone."""
        ...

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
        """norm(x) times weight transposed, plus bias; then gated, if an activation is named; then added to `add_to`.

        norm is (weight [K], eps) of an RMSNorm. Returns a new tensor, or `add_to`.
        """
        ...

    def turn_and_write(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        cos_sin: Tensor,
        norm: tuple[Tensor, Tensor, float] | None,
        kv: KvLayer,
        slots: Tensor,
    ) -> None:
        """On qkv [T, (Hq + 2 Hkv) D] in place: norm q and k heads, rotate them by cos_sin [T, rot], write k and v.

        heads (Hq, Hkv, D); norm (q weight [D], k weight [D], eps); slots int64 [T] as in Batch.
        """
        ...

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[Tensor, Tensor, str]) -> Tensor:
        """Sum over a of weights[t, a] * expert[chosen[t, a]](x[t]); x [T, K], chosen int64 and weights [T, A].

        matrices: gate_up [E, 2 F, K], down [E, K, F], and the activation of gates.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A plain layer: norm, attention, addition, norm, gated products, addition; without biases or norms of heads.

    norms are float32 [hidden]; heads (Hq, Hkv, D)
    """

    before_attn: Tensor
    qkv: Weight
    out: Weight
    before_mlp: Tensor
    gate_up: Weight
    down: Weight
    eps: float
    heads: tuple[int, int, int]
    activation: str
    spec: AttnSpec


WholeLayer: TypeAlias = Callable[[Tensor, KvLayer, Batch, Tensor], bool]
"""(stream [T, hidden], kv, batch, cos_sin): the stream has gone through the layer, in place; or False, it has not."""


@runtime_checkable
class WholeLayers(Protocol):
    """Fusions that have some steps of a whole layer as one operator besides."""

    def layer(self, parts: LayerParts) -> WholeLayer | None:
        """The operator for a layer; None if there is none for it."""
        ...


class Backend(Protocol):
    """Operators on [T, ...] activations of one dtype. Never synchronises; results are new tensors unless said.

    Norm weights are float32 and norms are computed in float32 (float64 for float64 inputs), then rounded to x's dtype.
    `fusions` None: every operator stands alone.
    """

    name: str
    attention: Attention
    fusions: Fusions | None

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        """What hidden states are held in between layers beside weights of this dtype."""
        ...

    def kv_dtype(self, weights: torch.dtype) -> torch.dtype:
        """What keys and values are held in beside weights of this dtype."""
        ...

    def pack(self, weight: Tensor, stored: Sequence[Stored]) -> Weight:
        """The form of a loaded weight [N, K] that `linear` is fastest with; `stored`: its parts, from row 0 on."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's dtype."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(residual + x), residual + x); `residual` may be overwritten."""
        ...

    def rotate(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Rotary embedding, halves form (Su et al., 2021): pairs (i, i + rot / 2) of the first `rot` dimensions.

        x [T, H, D], queries and keys side by side; cos_sin float32 [T, rot]: cosines of rot / 2 frequencies, then
        sines. May be done in place; the result is returned.
        """
        ...

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """act(x[:, :F]) * x[:, F:] for x [T, 2 F]; activation is silu or gelu_tanh or gelu."""
        ...

    def choose(self, logits: Tensor, u: Tensor, controls: Controls) -> Tensor:
        """One sampled id per row, int64 [S]; see kernels/sampling.py for the rule."""
        ...
