"""A decoder, described: every number and switch the one decoder understands. No weights, no family names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from steelyard.layers.mlp import MoeShape
from steelyard.layers.rotary import RopeConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer. `rope` indexes DecoderConfig.ropes, None: positions are not used (SmolLM3).

    window, keep_first  as in kernels.attention.AttnSpec
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    window: int | None = None
    rope: int | None = 0
    moe: MoeShape | None = None
    keep_first: int = 0


@dataclass(frozen=True, slots=True)
class NormNames:
    """The four places a layer may normalise, by checkpoint name; None: not there.

    x + after_attn(attention(before_attn(x))), then the same around the MLP.
    """

    before_attn: str | None = "input_layernorm"
    after_attn: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A whole decoder. Defaults are Llama's; see models/families.py for who differs where.

    context               positions the model was trained for
    embed_scale           multiplies token embeddings; residual_scale each branch before it is added
    attn_scale            multiplies q.k; None: 1 / sqrt(head_dim)
    fused_names           the checkpoint holds qkv_proj and gate_up_proj
    prefix                of every name but the head's
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    context: int
    norm_eps: float = 1e-6
    activation: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"
    norms: NormNames = field(default_factory=NormNames)
    norm_stored_minus_one: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    attn_scale: float | None = None
    attn_softcap: float | None = None
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    tied: bool = False
    fused_names: bool = False
    prefix: str = "model"
    head_name: str = "lm_head"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows in order of first use: one KV group each."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))

    def bounded(self, window: int, keep_first: int) -> DecoderConfig:
        """The same with every layer held to a window and its first positions; only for one that has no windows."""
        assert self.windows == (None,), self.windows
        return replace(self, layers=tuple(replace(x, window=window, keep_first=keep_first) for x in self.layers))
