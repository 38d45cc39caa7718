"""Feed-forward layers: the gated one, and a mixture of them behind a router."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.layers.linear import Linear, Place, Target
from steelyard.layers.norm import RmsNorm


class GatedMlp:
    """down(act(gate(x)) * up(x)), gate and up in one product (Shazeer, 2020)."""

    __slots__ = ("activation", "backend", "down", "gate_up")

    def __init__(self, place: Place, hidden_size: int, inner_size: int, activation: str, bias: bool = False) -> None:
        self.backend = place.backend
        self.activation = activation
        self.gate_up = Linear(place, hidden_size, (inner_size, inner_size), bias)
        self.down = Linear(place, inner_size, (hidden_size,), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self.backend.gated(self.gate_up(x), self.activation))

    def add_to(self, stream: Tensor, norm: RmsNorm) -> None:
        """stream [T, hidden] += mlp(norm(stream)), with the backend's fused products."""
        self.down.add_to(stream, self.gate_up.of_normed(stream, norm.numbers, self.activation))

    def targets(self, name: str, fused: bool) -> dict[str, Target]:
        """Checkpoint name -> view; `fused` checkpoints hold gate and up as one tensor (Phi-3)."""
        names = [f"{name}.gate_up_proj"] if fused else [f"{name}.gate_proj", f"{name}.up_proj"]
        return self.gate_up.targets(*names) | self.down.targets(f"{name}.down_proj")


@dataclass(frozen=True, slots=True)
class MoeShape:
    """A router's sizes.

    renormalise  weights of the chosen experts sum to one (Mixtral, Qwen3-MoE); else they are the softmax's own
    names        (block, router, gate, up, down) as the checkpoint calls them
    """

    num_experts: int
    num_chosen: int
    inner_size: int
    renormalise: bool
    names: tuple[str, str, str, str, str]


class MixtureOfExperts:
    """Each token goes through its `num_chosen` best experts, weighted (Shazeer et al., 2017)."""

    __slots__ = ("activation", "backend", "down", "gate_up", "router", "shape")

    def __init__(self, place: Place, hidden_size: int, shape: MoeShape, activation: str) -> None:
        self.backend = place.backend
        self.shape = shape
        self.activation = activation
        self.router = Linear(place, hidden_size, (shape.num_experts,), bias=False)
        self.gate_up = place.empty(shape.num_experts, 2 * shape.inner_size, hidden_size)
        self.down = place.empty(shape.num_experts, hidden_size, shape.inner_size)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        chances = torch.softmax(self.router(x).float(), dim=-1)
        weights, chosen = torch.topk(chances, self.shape.num_chosen, dim=-1)
        if self.shape.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        if self.backend.fusions is not None:
            return self.backend.fusions.experts(x, chosen, weights, (self.gate_up, self.down, self.activation))
        out = torch.zeros_like(x)
        for expert in range(self.shape.num_experts):
            token, rank = torch.nonzero(chosen == expert, as_tuple=True)
            if not token.numel():
                continue
            inner = self.backend.gated(self.backend.linear(x[token], self.gate_up[expert]), self.activation)
            part = self.backend.linear(inner, self.down[expert]) * weights[token, rank, None]
            out.index_add_(0, token, part)
        return out

    def targets(self, layer: str) -> dict[str, Target]:
        """Checkpoint name -> view, every expert's matrices by its number."""
        block, router, gate, up, down = self.shape.names
        inner = self.shape.inner_size
        found = self.router.targets(f"{layer}.{block}.{router}")
        for expert in range(self.shape.num_experts):
            name = f"{layer}.{block}.experts.{expert}"
            found[f"{name}.{gate}.weight"] = Target(self.gate_up[expert, :inner])
            found[f"{name}.{up}.weight"] = Target(self.gate_up[expert, inner:])
            found[f"{name}.{down}.weight"] = Target(self.down[expert])
        return found
