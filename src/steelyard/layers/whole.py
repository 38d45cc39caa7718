"""A plain decoder layer as one operator, where a backend has it. What is plain is decided here; nothing is computed."""

from __future__ import annotations

from steelyard.kernels.backend import LayerParts, WholeLayer, WholeLayers
from steelyard.layers.attention import SelfAttention
from steelyard.layers.mlp import GatedMlp
from steelyard.layers.norm import RmsNorm

__all__ = ["WholeLayer", "whole_layer"]


def whole_layer(attention: SelfAttention, mlp: GatedMlp, norms: tuple[RmsNorm, RmsNorm]) -> WholeLayer | None:
    """The operator for packed weights behind norms (before attention, before the mlp); None if there is none."""
    fusions, shape = attention.backend.fusions, attention.shape
    if not isinstance(fusions, WholeLayers) or attention.q_norm is not None or norms[0].eps != norms[1].eps:
        return None
    products = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    if any(product.bias is not None for product in products):
        return None
    parts = LayerParts(
        before_attn=norms[0].weight,
        qkv=attention.qkv.packed,
        out=attention.out.packed,
        before_mlp=norms[1].weight,
        gate_up=mlp.gate_up.packed,
        down=mlp.down.packed,
        eps=norms[0].eps,
        heads=(shape.num_heads, shape.num_kv_heads, shape.head_dim),
        activation=mlp.activation,
        spec=attention.spec,
    )
    return fusions.layer(parts)
