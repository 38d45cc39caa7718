"""From a Hugging Face config to layers: which tensors each model family has. No bytes, no time.

One row of FAMILIES a family: how it differs from llama. A tensor that a family adds is counted exactly, biases
and norms included, so the sums equal the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from steelyard.errors import CheckpointError
from steelyard.plan.fields import Fields
from steelyard.plan.parts import AttentionShape, ExpertsShape, LayerShape, Part, Split, Weight

QkNorm = Literal["", "head", "all"]
Windows = Literal["never", "all", "flag", "pattern"]
Sparse = Literal["never", "all", "step", "after"]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's tensors differ from llama's.

    qkv_bias     q, k and v have biases whatever the config says; o_bias: o too
    qk_norm      a norm over each head ("head"), or over all heads together ("all")
    num_norms    norms over the hidden size in a layer
    norm_vectors 2 where norms are layer norms with a bias
    gated        the MLP has gate, up and down; else up and down
    windows      "all" layers have `sliding_window`; only under `use_sliding_window` ("flag"); all but every
                 pattern-th layer ("pattern")
    sparse       which layers have experts
    latent       multi-head latent attention
    defaults     values of fields that published configs of the family leave out
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = ""
    num_norms: int = 2
    norm_vectors: int = 1
    gated: bool = True
    windows: Windows = "never"
    sparse: Sparse = "never"
    latent: bool = False
    sinks: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    score_correction: bool = False
    positions: int = 0
    defaults: dict[str, Any] = field(default_factory=dict)


_TIED = {"tie_word_embeddings": True}
_GEMMA = {**_TIED, "head_dim": 256}
_GEMMA3 = {**_GEMMA, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
_GEMMA3 |= {"max_position_embeddings": 131072, "sliding_window_pattern": 6, "sliding_window": 4096}
_DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(windows="all"),
    "qwen2": Family(qkv_bias=True, windows="flag"),
    "qwen3": Family(qk_norm="head", windows="flag", defaults={"head_dim": 128}),
    "gemma": Family(defaults=_GEMMA),
    "gemma2": Family(num_norms=4, windows="pattern", defaults={**_GEMMA, "sliding_window_pattern": 2}),
    "gemma3_text": Family(qk_norm="head", num_norms=4, windows="pattern", defaults=_GEMMA3),
    "phi3": Family(windows="all"),
    "olmo2": Family(qk_norm="all"),
    "olmo3": Family(qk_norm="all", windows="pattern", defaults={"sliding_window_pattern": 4}),
    "granite": Family(),
    "smollm3": Family(windows="flag", defaults=_TIED),
    "cohere2": Family(num_norms=1, windows="pattern", defaults={**_TIED, "sliding_window_pattern": 4}),
    "mixtral": Family(windows="all", sparse="all", defaults={"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": Family(qkv_bias=True, windows="flag", sparse="step"),
    "qwen3_moe": Family(qk_norm="head", windows="flag", sparse="step", defaults={"head_dim": 128}),
    "olmoe": Family(qk_norm="all", sparse="all", defaults={"num_experts": 64, "num_experts_per_tok": 8}),
    "deepseek_v2": Family(latent=True, sparse="after", defaults={**_DEEPSEEK, "n_shared_experts": 2}),
    "deepseek_v3": Family(
        latent=True, sparse="after", score_correction=True, defaults={**_DEEPSEEK, "n_shared_experts": 1}
    ),
    "gpt_oss": Family(
        qkv_bias=True,
        o_bias=True,
        windows="pattern",
        sparse="all",
        sinks=True,
        router_bias=True,
        expert_bias=True,
        defaults={"head_dim": 64, "sliding_window_pattern": 2, "num_experts_per_tok": 4},
    ),
    "opt": Family(
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        norm_vectors=2,
        positions=2,
        defaults=_TIED,
    ),
}
ALIASES = {"gemma3": "gemma3_text", "ministral": "mistral", "gemma3_model": "gemma3_text"}


@dataclass(frozen=True, slots=True)
class Decoder:
    """What a config says, as parts. `ends` are the tensors outside layers: embeddings, final norm, head.

    intermediate_size  the largest of any layer: pruned models have one a layer
    """

    family: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    tied: bool
    layers: tuple[LayerShape, ...]
    ends: tuple[Weight, ...]


def read_decoder(config: Mapping[str, Any]) -> Decoder:
    """The decoder a config.json describes; the language part of a multimodal one. Raises CheckpointError."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {k: config[k] for k in ("tie_word_embeddings",) if config.get(k) is not None} | dict(text)
    name = str(config.get("model_type") or "")
    name = ALIASES.get(name, name)
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"config.json: model_type {name!r} is not one of {known}", param="model_type")
    fields = Fields(config, family.defaults)
    hidden = fields.count("hidden_size")
    num_layers = fields.count("num_hidden_layers")
    windows = _windows(fields, family, num_layers)
    made: dict[tuple[int | None, bool, int], LayerShape] = {}
    layers = []
    inner_sizes = fields.counts("intermediate_size", "ffn_dim", length=num_layers, default=4 * hidden)
    for index, (window, inner) in enumerate(zip(windows, inner_sizes, strict=True)):
        kind = (window, _is_sparse(fields, family, index), inner)
        if kind not in made:
            made[kind] = _layer(fields, family, *kind)
        layers.append(made[kind])
    tied = fields.flag("tie_word_embeddings")
    return Decoder(
        family=name,
        hidden_size=hidden,
        intermediate_size=max(inner_sizes),
        vocab_size=fields.count("vocab_size"),
        max_position=fields.count("max_position_embeddings", default=2048),
        tied=tied,
        layers=tuple(layers),
        ends=_ends(fields, family, tied),
    )


def _ends(fields: Fields, family: Family, tied: bool) -> tuple[Weight, ...]:
    hidden, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    ends = [Weight("embed_tokens", vocab * hidden, Part.EMBEDDING)]
    if family.positions:
        rows = fields.count("max_position_embeddings") + family.positions
        ends.append(Weight("embed_positions", rows * hidden, Part.EMBEDDING, Split.WHOLE))
    ends.append(_vector("norm", hidden * family.norm_vectors, Part.NORM))
    if not tied:
        ends.append(Weight("lm_head", vocab * hidden, Part.HEAD))
    return tuple(ends)


def _layer(fields: Fields, family: Family, window: int | None, sparse: bool, inner: int) -> LayerShape:
    hidden = fields.count("hidden_size")
    attention, weights = (_latent if family.latent else _heads)(fields, family, window)
    weights += [_vector(f"norm{i}", hidden * family.norm_vectors, Part.NORM) for i in range(family.num_norms)]
    if not sparse:
        bias = family.mlp_bias or fields.flag("mlp_bias")
        return LayerShape(attention, (*weights, *_mlp(hidden, inner, family.gated, bias)))
    num_experts = _num_experts(fields)
    inner = fields.count("moe_intermediate_size", "intermediate_size")
    weights.append(Weight("router", num_experts * hidden, Part.MLP, Split.WHOLE))
    if family.router_bias or family.score_correction:
        weights.append(_vector("router.bias", num_experts, Part.MLP))
    shared = fields.optional_count("shared_expert_intermediate_size")
    if shared:
        weights.append(Weight("shared_expert_gate", hidden, Part.MLP, Split.WHOLE))
    else:
        shared = fields.count("n_shared_experts", default=0, low=0) * inner
    if shared:
        weights += _mlp(hidden, shared, True, False)
    expert = tuple(_mlp(hidden, inner, True, family.expert_bias, Part.EXPERTS))
    per_token = fields.count("num_experts_per_tok", "experts_per_token")
    return LayerShape(attention, tuple(weights), ExpertsShape(num_experts, per_token, expert))


def _mlp(hidden: int, inner: int, gated: bool, bias: bool, part: Part = Part.MLP) -> list[Weight]:
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    weights = [Weight(n, hidden * inner, part) for n in names] + [Weight("down_proj", inner * hidden, part)]
    if bias:
        weights += [Weight(f"{n}.bias", inner, part, is_matrix=False) for n in names]
        weights.append(_vector("down_proj.bias", hidden, part))
    return weights


def _heads(fields: Fields, family: Family, window: int | None) -> tuple[AttentionShape, list[Weight]]:
    """Attention with a key and a value per KV head. `head_dim` is its own field; hidden / heads is the fallback."""
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        what = f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        raise CheckpointError(what, param="num_key_value_heads")
    dim = fields.optional_count("head_dim") or hidden // heads
    q, kv = heads * dim, kv_heads * dim
    part = Part.ATTENTION
    weights = [
        Weight("q_proj", hidden * q, part),
        Weight("k_proj", hidden * kv, part, Split.KV),
        Weight("v_proj", hidden * kv, part, Split.KV),
        Weight("o_proj", q * hidden, part),
    ]
    all_bias = fields.flag("attention_bias")
    if family.qkv_bias or all_bias:
        weights.append(Weight("q_proj.bias", q, part, is_matrix=False))
        weights += [Weight(f"{n}.bias", kv, part, Split.KV, is_matrix=False) for n in ("k_proj", "v_proj")]
    if family.o_bias or all_bias:
        weights.append(_vector("o_proj.bias", hidden, part))
    if family.qk_norm == "head":
        weights += [_vector("q_norm", dim, part), _vector("k_norm", dim, part)]
    elif family.qk_norm == "all":
        weights += [_vector("q_norm", q, part), _vector("k_norm", kv, part)]
    if family.sinks:
        weights.append(Weight("sinks", heads, part, is_matrix=False))
    return AttentionShape(heads, kv_heads, dim, dim, window), weights


def _latent(fields: Fields, family: Family, window: int | None) -> tuple[AttentionShape, list[Weight]]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): one latent and one rotary key."""
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope, v_dim = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    q_rank = fields.optional_count("q_lora_rank")
    q = heads * (nope + rope)
    part = Part.ATTENTION
    if q_rank:
        weights = [
            Weight("q_a_proj", hidden * q_rank, part, Split.WHOLE),
            _vector("q_a_layernorm", q_rank, part),
            Weight("q_b_proj", q_rank * q, part),
        ]
    else:
        weights = [Weight("q_proj", hidden * q, part)]
    weights += [
        Weight("kv_a_proj_with_mqa", hidden * (rank + rope), part, Split.WHOLE),
        _vector("kv_a_layernorm", rank, part),
        Weight("kv_b_proj", rank * heads * (nope + v_dim), part),
        Weight("o_proj", heads * v_dim * hidden, part),
    ]
    return AttentionShape(heads, heads, nope + rope, v_dim, window, rank + rope, rank), weights


def _vector(name: str, num_elements: int, part: Part) -> Weight:
    return Weight(name, num_elements, part, Split.WHOLE, is_matrix=False)


def _num_experts(fields: Fields) -> int:
    return fields.count("num_experts", "num_local_experts", "n_routed_experts")


def _is_sparse(fields: Fields, family: Family, index: int) -> bool:
    if family.sparse in ("never", "all"):
        return family.sparse == "all"
    if family.sparse == "step":
        dense = fields.get("mlp_only_layers") or []
        return index not in dense and (index + 1) % fields.count("decoder_sparse_step", default=1) == 0
    after = index >= fields.count("first_k_dense_replace", default=0, low=0)
    return after and index % fields.count("moe_layer_freq", default=1) == 0


def _windows(fields: Fields, family: Family, num_layers: int) -> list[int | None]:
    """Each layer's attention window. `layer_types` decides where present, else the family's rule."""
    window = fields.optional_count("sliding_window")
    rule = family.windows
    if rule == "never" or window is None or (rule == "flag" and not fields.flag("use_sliding_window")):
        return [None] * num_layers
    types = fields.names("layer_types", num_layers)
    if types is not None:
        return [window if t == "sliding_attention" else None for t in types]
    if rule == "flag":
        first = fields.count("max_window_layers", default=0, low=0)
        return [window if i >= first else None for i in range(num_layers)]
    if rule == "pattern":
        every = fields.count("sliding_window_pattern", "_sliding_window_pattern")
        return [None if (i + 1) % every == 0 else window for i in range(num_layers)]
    return [window] * num_layers
