"""Token embedding, and the output head that may share its matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steelyard.kernels.backend import Stored, Weight
from steelyard.layers.linear import Place, Target


class Embedding:
    """weight [V, H]; the input lookup multiplies by `scale` (Gemma, Granite)."""

    __slots__ = ("dtype", "scale", "weight")

    def __init__(self, place: Place, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        self.weight = place.empty(vocab_size, hidden_size)
        self.scale = scale
        self.dtype = place.activations

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H] in the dtype of activations."""
        found = torch.nn.functional.embedding(token_ids, self.weight).to(self.dtype)
        return found if self.scale == 1.0 else found * self.scale

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint name -> view."""
        return {f"{name}.weight": Target(self.weight)}


class Head:
    """Hidden states to float32 logits: x W^T, divided by `divisor` (Granite), soft-capped (Gemma 2)."""

    __slots__ = ("backend", "divisor", "packed", "softcap", "weight")

    def __init__(self, place: Place, weight: Tensor, divisor: float = 1.0, softcap: float | None = None) -> None:
        self.backend = place.backend
        self.weight = weight
        self.packed: Weight = weight
        self.divisor = divisor
        self.softcap = softcap

    def pack(self, stored: Sequence[Stored]) -> None:
        """See Linear.pack."""
        self.packed = self.backend.pack(self.weight, stored)

    def __call__(self, hidden: Tensor, as_computed: bool = False) -> Tensor:
        """[S, H] -> float32 [S, V] (float64 in a float64 model).

        as_computed: where nothing is applied to the product, it is left in its own dtype, for a reader that widens.
        """
        logits = self.backend.linear(hidden, self.packed)
        if as_computed and self.divisor == 1.0 and self.softcap is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits
