"""Translates GGUF metadata into the keys of a Hugging Face config.json, one function a group of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steelyard.checkpoint.gguf_header import Header, shortest
from steelyard.checkpoint.gguf_names import FAMILIES, Family, Layout
from steelyard.checkpoint.gguf_rope import rope_scaling
from steelyard.errors import CheckpointError

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_GEMMA3_PATTERN, _SMOLLM3_PATTERN = 6, 4


def family_of(header: Header) -> Family:
    """The row of the table. Llama's architecture also carries Mixtral (experts) and Mistral (a window)."""
    arch = header.arch
    if arch not in FAMILIES or arch in {"mixtral", "mistral"}:
        supported = ", ".join(sorted(set(FAMILIES) - {"mixtral", "mistral"}))
        raise CheckpointError(f"{header.path}: architecture '{arch}' is not supported in GGUF, only {supported}")
    if arch == "llama" and header.get("expert_count", default=0) > 0:
        return FAMILIES["mixtral"]
    if arch == "llama" and header.get("attention.sliding_window", default=0) > 0:
        return FAMILIES["mistral"]
    return FAMILIES[arch]


def layout_of(header: Header) -> Layout:
    num_layers = header.get("block_count")
    if not 0 < num_layers < 10_000:
        raise CheckpointError(f"{header.path}: metadata '{header.arch}.block_count' is {num_layers}")
    heads = header.per_layer("attention.head_count", num_layers)
    return Layout(heads, header.per_layer("attention.head_count_kv", num_layers, heads))


def config_of(header: Header, family: Family, layout: Layout) -> dict[str, Any]:
    """The config.json this file's model would have. Raises CheckpointError naming a missing or odd key."""
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{header.path}: tensor 'token_embd.weight' is missing")
    hidden = header.get("embedding_length")
    heads = layout.num_heads[0]
    head_dim = header.get("attention.key_length", default=hidden // heads if heads else 0)
    if head_dim <= 0 or header.get("attention.value_length", default=head_dim) != head_dim:
        raise CheckpointError(f"{header.path}: key and value heads of different or no size are not supported")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": header.tensors["token_embd.weight"][1].shape[0],
        "hidden_size": hidden,
        "intermediate_size": _one_or_all(header.per_layer("feed_forward_length", layout.num_layers)),
        "num_hidden_layers": layout.num_layers,
        "num_attention_heads": _one_or_all(layout.num_heads),
        "num_key_value_heads": _one_or_all(layout.num_kv_heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.get("context_length"),
        "rms_norm_eps": header.get("attention.layer_norm_rms_epsilon", float),
        "rope_theta": header.get("rope.freq_base", float, 10000.0),
        "rope_scaling": rope_scaling(header, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
    }
    rotary_dim = header.get("rope.dimension_count", default=head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    config.update(_EXTRAS.get(family.model_type, _no_extras)(header, config))
    return config


def _one_or_all(values: list[int]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else values


def _no_extras(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    return {}


def _llama(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    }


def _mistral(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": header.get("attention.sliding_window")}


def _mixtral(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": header.get("expert_count"),
        "num_experts_per_tok": header.get("expert_used_count"),
        "sliding_window": header.get("attention.sliding_window", default=None),
    }


def _experts(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    out = {"num_experts": header.get("expert_count"), "num_experts_per_tok": header.get("expert_used_count")}
    if header.arch == "qwen3moe":  # the converter drops norm_topk_prob; llama.cpp always renormalises this family
        out |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        out["moe_intermediate_size"] = header.get("expert_feed_forward_length")
    else:
        out |= {"norm_topk_prob": False, "clip_qkv": header.get("attention.clamp_kqv", float, None)}
    return out


def _granite(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    head_scale = config["head_dim"] ** -0.5
    return {
        "attention_multiplier": header.get("attention.scale", float, head_scale),
        "embedding_multiplier": header.get("embedding_scale", float, 1.0),
        "residual_multiplier": header.get("residual_scale", float, 1.0),
        "logits_scaling": header.get("logit_scale", float, 1.0),
        **_llama(header, config),
    }


def _smollm3(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    layers = range(1, config["num_hidden_layers"] + 1)
    return {"no_rope_layers": [int(i % _SMOLLM3_PATTERN != 0) for i in layers], **_llama(header, config)}


def _gemma(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    return {
        **_gemma(header, config),
        "query_pre_attn_scalar": _gemma_scalar(config, _GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": header.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": header.get("final_logit_softcapping", float, 30.0),
        "sliding_window": header.get("attention.sliding_window", default=4096),
        "layer_types": _windows(num_layers, 2),
    }


def _gemma3(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    pattern = header.get("attention.sliding_window_pattern", default=_GEMMA3_PATTERN)
    return {
        **_gemma(header, config),
        "rope_theta": header.get("rope.freq_base", float, 1_000_000.0),
        "rope_local_base_freq": header.get("rope.freq_base_swa", float, 10_000.0),
        "query_pre_attn_scalar": _gemma_scalar(config, _GEMMA3_27B_LAYERS),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": header.get("final_logit_softcapping", float, None),
        "sliding_window": header.get("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": _windows(config["num_hidden_layers"], pattern),
    }


def _gemma_scalar(config: dict[str, Any], largest_num_layers: int) -> int:
    """The attention scale's square is not in the file: only the largest models divide by hidden / heads."""
    if config["num_hidden_layers"] == largest_num_layers:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _windows(num_layers: int, pattern: int) -> list[str]:
    """Every `pattern`-th layer attends to everything, the others to a window."""
    return ["full_attention" if i % pattern == 0 else "sliding_attention" for i in range(1, num_layers + 1)]


def _phi3(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    context = config["max_position_embeddings"]
    return {
        "sliding_window": header.get("attention.sliding_window", default=0) or None,
        "original_max_position_embeddings": header.get("rope.scaling.original_context_length", default=context),
    }


_EXTRAS: dict[str, Callable[[Header, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen3_moe": _experts,
    "olmoe": _experts,
    "granite": _granite,
    "smollm3": _smollm3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}


_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def generation_config_of(header: Header) -> dict[str, Any]:
    """The sampling values a file recommends (general.sampling.*), under generation_config.json's names."""
    found = {name: header.metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return {name: shortest(v) if isinstance(v, float) else v for name, v in found.items() if v is not None}
