"""Linear layers: one matrix, or several that share an input fused into one. No parallelism here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.backend import Backend, Stored, Weight


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes: a view of a weight, and the number added to every value on the way."""

    view: Tensor
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """How weights are held, and the operators that work on them."""

    dtype: torch.dtype
    device: torch.device
    backend: Backend

    @property
    def activations(self) -> torch.dtype:
        """What hidden states are held in between layers."""
        return self.backend.activation_dtype(self.dtype)

    @property
    def kv_dtype(self) -> torch.dtype:
        """What keys and values are held in."""
        return self.backend.kv_dtype(self.dtype)

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised weight: the loader fills every element or refuses the checkpoint."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def empty_norm(self, *shape: int) -> Tensor:
        """An uninitialised norm weight: float32 (float64 in a float64 model), since it is tiny and rounds badly."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        return torch.empty(shape, dtype=dtype, device=self.device)


class Linear:
    """y = x W^T + b with W [sum(parts), K]: outputs of `parts` lie side by side, so one product serves all.

    q | k | v, or gate | up: parts keep their own names in the checkpoint.
    """

    __slots__ = ("backend", "bias", "packed", "parts", "weight")

    def __init__(self, place: Place, num_inputs: int, parts: tuple[int, ...], bias: bool) -> None:
        self.backend = place.backend
        self.parts = parts
        self.weight = place.empty(sum(parts), num_inputs)
        self.packed: Weight = self.weight
        self.bias = place.empty(sum(parts)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, sum(parts)]."""
        return self.backend.linear(x, self.packed, self.bias)

    def of_normed(self, x: Tensor, norm: tuple[Tensor, float], activation: str | None = None) -> Tensor:
        """The product of norm(x), gated if an activation is named, in one operator; norm: (weight, eps)."""
        assert self.backend.fusions is not None
        return self.backend.fusions.product(x, self.packed, bias=self.bias, norm=norm, activation=activation)

    def add_to(self, stream: Tensor, x: Tensor) -> None:
        """stream [T, N] += the product of x, in one operator of the backend."""
        assert self.backend.fusions is not None
        self.backend.fusions.product(x, self.packed, bias=self.bias, add_to=stream)

    def pack(self, stored: Sequence[Stored]) -> None:
        """After loading: let the backend choose the weight's form. `stored`: see Backend.pack.

        Afterwards `weight` is a shape without data, unless the backend uses it as it is.
        """
        self.packed = self.backend.pack(self.weight, stored)
        if self.packed is not self.weight:
            self.weight = self.weight.to("meta")

    def targets(self, *names: str) -> dict[str, Target]:
        """Checkpoint name -> view. One name: a checkpoint that is fused already; else one name a part."""
        sizes = self.parts if len(names) > 1 else (sum(self.parts),)
        assert len(sizes) == len(names), f"{names} for {len(sizes)} parts"
        found: dict[str, Target] = {}
        first = 0
        for name, size in zip(names, sizes, strict=True):
            found[f"{name}.weight"] = Target(self.weight[first : first + size])
            if self.bias is not None:
                found[f"{name}.bias"] = Target(self.bias[first : first + size])
            first += size
        return found
