"""RMS normalisation, with and without the residual addition before it."""

from __future__ import annotations

from torch import Tensor

from steelyard.layers.linear import Place, Target


class RmsNorm:
    """weight [N]; Gemma's checkpoints store it minus one, which `stored_minus_one` undoes while loading."""

    __slots__ = ("backend", "eps", "offset", "weight")

    def __init__(self, place: Place, size: int, eps: float, stored_minus_one: bool = False) -> None:
        self.backend = place.backend
        self.weight = place.empty_norm(size)
        self.eps = eps
        self.offset = 1.0 if stored_minus_one else 0.0

    @property
    def numbers(self) -> tuple[Tensor, float]:
        """(weight, eps), for an operator that has the norm inside."""
        return self.weight, self.eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., N] -> the same shape."""
        return self.backend.rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(residual + x), residual + x); `residual` may be overwritten."""
        return self.backend.add_rms_norm(x, residual, self.weight, self.eps)

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint name -> view."""
        return {f"{name}.weight": Target(self.weight, self.offset)}
