"""Which switches of the one decoder each model family sets. A table; sizes come from plan.shape, weights from load.

A new family is a row here (and one in plan/families.py for its counts); a new switch is a field of DecoderConfig.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.errors import CheckpointError
from steelyard.layers.mlp import MoeShape
from steelyard.layers.rotary import RopeConfig
from steelyard.models.config import DecoderConfig, LayerConfig, NormNames
from steelyard.plan.shape import ModelShape

_PRE = NormNames()
_SANDWICH = NormNames(
    after_attn="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_POST = NormNames(
    before_attn=None,
    after_attn="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_QWEN_EXPERTS = ("mlp", "gate", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_EXPERTS = ("block_sparse_moe", "gate", "w1", "w3", "w2")


@dataclass(frozen=True, slots=True)
class Family:
    """How a family computes differently from Llama.

    scales        config -> the DecoderConfig fields that depend on numbers of the config
    experts       names of (block, router, gate, up, down); `renormalise`: None asks the config
    ignored       suffixes or prefixes of checkpoint tensors that are known and not needed
    """

    norms: NormNames = _PRE
    norm_stored_minus_one: bool = False
    activation: str | None = None
    fused_names: bool = False
    scales: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    experts: tuple[str, str, str, str, str] | None = None
    renormalise: bool | None = None
    ignored: tuple[str, ...] = ()


def _gemma_scales(config: Mapping[str, Any]) -> dict[str, Any]:
    scales: dict[str, Any] = {"embed_scale": math.sqrt(config["hidden_size"])}
    if config.get("query_pre_attn_scalar") is not None:
        scales["attn_scale"] = config["query_pre_attn_scalar"] ** -0.5
    scales["attn_softcap"] = config.get("attn_logit_softcapping")
    scales["logits_softcap"] = config.get("final_logit_softcapping")
    return scales


def _gemma2_scales(config: Mapping[str, Any]) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
    return _gemma_scales(caps | dict(config))


def _gemma3_scales(config: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma_scales({"query_pre_attn_scalar": 256} | dict(config))


def _granite_scales(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embed_scale": float(config.get("embedding_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "attn_scale": float(config.get("attention_multiplier", 1.0)),
        "logits_divisor": float(config.get("logits_scaling", 1.0)),
    }


_VISION = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": Family(norm_stored_minus_one=True, activation="gelu_tanh", scales=_gemma_scales),
    "gemma2": Family(_SANDWICH, norm_stored_minus_one=True, scales=_gemma2_scales),
    "gemma3_text": Family(_SANDWICH, norm_stored_minus_one=True, scales=_gemma3_scales, ignored=_VISION),
    "phi3": Family(fused_names=True),
    "olmo2": Family(_POST),
    "olmo3": Family(_POST),
    "granite": Family(scales=_granite_scales),
    "smollm3": Family(),
    "mixtral": Family(experts=_MIXTRAL_EXPERTS, renormalise=True),
    "qwen3_moe": Family(experts=_QWEN_EXPERTS),
    "olmoe": Family(experts=_QWEN_EXPERTS),
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a Hugging Face config describes. Raises CheckpointError naming what is not supported."""
    shape = ModelShape.from_config(dict(config))
    config = text_part(config)
    name = shape.decoder.family
    family = family_of(name)
    if config.get("clip_qkv") is not None:
        raise CheckpointError(f"config.json: clip_qkv {config['clip_qkv']} is not supported", param="clip_qkv")
    ropes, rope_of_type = _ropes(config, shape.head_dim, shape.max_position)
    first = shape.layers[0]
    names = {weight.name: weight.num_elements for weight in first.weights}
    qk_norm = "none"
    if "q_norm" in names:
        qk_norm = "head" if names["q_norm"] == shape.head_dim and shape.num_heads > 1 else "full"
    return DecoderConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        layers=tuple(_layer(config, family, shape, i, rope_of_type) for i in range(shape.num_layers)),
        ropes=ropes,
        context=shape.max_position,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=family.activation or _activation(config),
        qkv_bias="q_proj.bias" in names,
        out_bias="o_proj.bias" in names,
        mlp_bias="down_proj.bias" in names,
        qk_norm=qk_norm,
        norms=family.norms,
        norm_stored_minus_one=family.norm_stored_minus_one,
        tied=shape.decoder.tied,
        fused_names=family.fused_names,
        **family.scales(config),
    )


def family_of(name: str) -> Family:
    """The row of a model_type. Raises CheckpointError for one that has none."""
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"config.json: model_type {name!r} cannot be run (can be: {known})", param="model_type")
    return FAMILIES[name]


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's config: `text_config` of a multimodal one, else the whole."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _activation(config: Mapping[str, Any]) -> str:
    name = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
    if name not in ACTIVATIONS:
        raise CheckpointError(f"config.json: activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _layer(
    config: Mapping[str, Any], family: Family, shape: ModelShape, index: int, rope_of_type: Mapping[str, int]
) -> LayerConfig:
    layer = shape.layers[index]
    heads = layer.attention
    inner = sum(w.num_elements for w in layer.weights if w.name == "gate_proj") // shape.hidden_size
    moe = None
    if layer.experts is not None:
        assert family.experts is not None
        expert_inner = sum(w.num_elements for w in layer.experts.weights if w.name == "gate_proj")
        moe = MoeShape(
            layer.experts.num_experts,
            layer.experts.num_per_token,
            expert_inner // shape.hidden_size,
            family.renormalise if family.renormalise is not None else bool(config.get("norm_topk_prob", False)),
            family.experts,
        )
    kind = "full_attention" if heads.window is None else "sliding_attention"
    rope: int | None = rope_of_type.get(kind, 0)
    if config.get("model_type") == "smollm3" and not _uses_rope(config, index):
        rope = None
    return LayerConfig(heads.num_heads, heads.num_kv_heads, heads.qk_dim, inner, heads.window, rope, moe)


def _uses_rope(config: Mapping[str, Any], index: int) -> bool:
    """SmolLM3: a list of flags, 0 for layers without positions; else every `no_rope_layer_interval`-th is one."""
    flags = config.get("no_rope_layers")
    if flags:
        return bool(flags[index])
    return (index + 1) % int(config.get("no_rope_layer_interval", 4)) != 0


def _ropes(config: Mapping[str, Any], head_dim: int, context: int) -> tuple[tuple[RopeConfig, ...], dict[str, int]]:
    """The rotary schemes, and which one layers of a type use. One for all layers, but for Gemma 3.

    Configs write `rope_parameters` (by layer type or not) or, older, `rope_theta`, `rope_scaling` and
    `rope_local_base_freq`.
    """
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping) and any(isinstance(v, Mapping) for v in parameters.values()):
        kinds = [k for k, v in parameters.items() if isinstance(v, Mapping)]
        ropes = tuple(_rope(config, parameters[k], head_dim, context) for k in kinds)
        return ropes, {kind: i for i, kind in enumerate(kinds)}
    scaling = parameters if isinstance(parameters, Mapping) else (config.get("rope_scaling") or {})
    whole = _rope(config, scaling, head_dim, context)
    if config.get("model_type") != "gemma3_text":
        return (whole,), {}
    local = RopeConfig(head_dim, float(config.get("rope_local_base_freq", 10000.0)), context=context)
    return (whole, local), {"full_attention": 0, "sliding_attention": 1}


def _rope(config: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int, context: int) -> RopeConfig:
    default_theta = 1e6 if config.get("model_type") in ("gemma3_text", "mixtral") else 1e4
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or default_theta)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    kind = {"su": "longrope"}.get(kind, kind)
    portion = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    own = {k: v for k, v in scaling.items() if k not in ("rope_theta", "rope_type", "type", "partial_rotary_factor")}
    if config.get("original_max_position_embeddings") and "original_max_position_embeddings" not in own:
        own["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    frozen = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in own.items())
    return RopeConfig(int(head_dim * float(portion)), theta, kind, frozen, context)
