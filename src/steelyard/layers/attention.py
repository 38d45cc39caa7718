"""Self-attention of one decoder layer: project, norm and rotate heads, attend over paged KV, project back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.attention import AttnSpec
from steelyard.layers.batch import StepBatch
from steelyard.layers.linear import Linear, Place, Target
from steelyard.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of one layer's attention, what it does to heads before rotating them, and what it computes.

    index     the layer's place in StepBatch.kv; `group` its KV group
    qk_norm   none; head: one norm over each head's D (Qwen 3, Gemma 3); full: over all heads at once (OLMo 2)
    """

    index: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str = "none"
    norm_eps: float = 1e-6
    norm_stored_minus_one: bool = False
    scale: float = 1.0
    softcap: float | None = None
    window: int | None = None
    group: int = 0
    keep_first: int = 0


class SelfAttention:
    """One layer. Without rotary rows (`cos_sin` None) it uses no positions."""

    __slots__ = ("backend", "k_norm", "out", "q_norm", "qkv", "shape", "spec")

    def __init__(self, place: Place, shape: HeadShape) -> None:
        self.backend = place.backend
        self.shape = shape
        self.spec = AttnSpec(
            scale=shape.scale,
            softcap=shape.softcap,
            window=shape.window,
            keep_first=shape.keep_first,
            group=shape.group,
        )
        num_q, num_kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.qkv = Linear(place, shape.hidden_size, (num_q, num_kv, num_kv), shape.qkv_bias)
        self.out = Linear(place, num_q, (shape.hidden_size,), shape.out_bias)
        self.q_norm = self.k_norm = None
        if shape.qk_norm != "none":
            sizes = (shape.head_dim, shape.head_dim) if shape.qk_norm == "head" else (num_q, num_kv)
            self.q_norm, self.k_norm = (
                RmsNorm(place, size, shape.norm_eps, shape.norm_stored_minus_one) for size in sizes
            )

    def __call__(self, x: Tensor, batch: StepBatch, cos_sin: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the new K and V are written to the layer's pool."""
        return self.out(self._attend(self.qkv(x), batch, cos_sin))

    def add_to(self, stream: Tensor, norm: RmsNorm, batch: StepBatch, cos_sin: Tensor | None) -> None:
        """stream [T, hidden] += attention(norm(stream)), with the backend's fused products."""
        self.out.add_to(stream, self._attend(self.qkv.of_normed(stream, norm.numbers), batch, cos_sin))

    def _attend(self, qkv: Tensor, batch: StepBatch, cos_sin: Tensor | None) -> Tensor:
        """Packed projections [T, (Hq + 2 Hkv) D] -> [T, Hq D]."""
        shape, kv, fusions = self.shape, batch.kv[self.shape.index], self.backend.fusions
        num_q, num_qk = shape.num_heads, shape.num_heads + shape.num_kv_heads
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        out = torch.empty(qkv.shape[0], num_q, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        k: Tensor | None = None
        v: Tensor | None = None
        if fusions is not None and cos_sin is not None and shape.qk_norm != "full":
            sizes = (num_q, shape.num_kv_heads, shape.head_dim)
            fusions.turn_and_write(qkv, sizes, cos_sin, self._norms, kv, batch.attn.slots[shape.group])
            q = heads.narrow(1, 0, num_q)
        else:
            rotated = heads[:, :num_qk] if self.q_norm is None else self._normed(heads, num_q, num_qk)
            if cos_sin is not None:
                rotated = self.backend.rotate(rotated, cos_sin)
            q, k, v = rotated[:, :num_q], rotated[:, num_q:], heads[:, num_qk:]
        self.backend.attention.forward(q, k, v, kv, batch.attn, self.spec, out)
        return out.view(qkv.shape[0], -1)

    @property
    def _norms(self) -> tuple[Tensor, Tensor, float] | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps

    def _normed(self, heads: Tensor, num_q: int, num_qk: int) -> Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        q, k = heads[:, :num_q], heads[:, num_q:num_qk]
        if self.shape.qk_norm == "head":
            return torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        flat = self.q_norm(q.flatten(1)), self.k_norm(k.flatten(1))
        return torch.cat(flat, dim=1).view(q.shape[0], num_qk, -1)

    def targets(self, name: str, fused: bool) -> dict[str, Target]:
        """Checkpoint name -> view; `fused` checkpoints hold q, k and v as one tensor (Phi-3)."""
        found = self.qkv.targets(
            *([f"{name}.qkv_proj"] if fused else [f"{name}.{part}_proj" for part in ("q", "k", "v")])
        )
        found |= self.out.targets(f"{name}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            found |= self.q_norm.targets(f"{name}.q_norm") | self.k_norm.targets(f"{name}.k_norm")
        return found
