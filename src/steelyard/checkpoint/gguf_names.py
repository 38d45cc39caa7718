"""Translates GGUF tensor names into Hugging Face parameter names, and notes what the file did to the values.

A family is a row of a table: which block names differ from Llama's, whether q and k rows are permuted for
interleaved rotary pairs, and whether norm weights have 1 added. Stacked experts become one entry an expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from steelyard.checkpoint.entry import TensorEntry
from steelyard.checkpoint.gguf import GgufTensor
from steelyard.errors import CheckpointError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL_EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}

# Read into the config (rotary factors) or recomputed (inverse frequencies of old files): never parameters.
ROTARY = re.compile(r"(blk\.\d+\.)?(rope_freqs|rope_factors_long|rope_factors_short|attn_rot_embd)\.weight")
_BLOCK_NAME = re.compile(r"blk\.(\d{1,5})\.([a-z0-9_]+)\.(weight|bias)")
_TOP_NAME = re.compile(r"([a-z0-9_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Family:
    """How one `general.architecture` is called and laid out in Hugging Face's terms.

    names     block names that differ from Llama's; experts: the stacked ones, below `expert_prefix`
    permuted  q and k rows are stored for interleaved rotary pairs
    """

    model_type: str
    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norms_plus_one: bool = False
    experts: Mapping[str, str] = field(default_factory=dict)
    expert_prefix: str = "mlp.experts"


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", permuted=True),
    "mixtral": Family(
        "mixtral",
        "MixtralForCausalLM",
        {"ffn_gate_inp": "block_sparse_moe.gate"},
        permuted=True,
        experts=_MIXTRAL_EXPERTS,
        expert_prefix="block_sparse_moe.experts",
    ),
    "mistral": Family("mistral", "MistralForCausalLM", permuted=True),
    "granite": Family("granite", "GraniteForCausalLM", permuted=True),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", permuted=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _QK_NORMS),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", {**_QK_NORMS, "ffn_gate_inp": "mlp.gate"}, experts=_EXPERTS),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", {**_QK_NORMS, **_SANDWICH_NORMS}),
    "olmoe": Family("olmoe", "OlmoeForCausalLM", {**_QK_NORMS, "ffn_gate_inp": "mlp.gate"}, experts=_EXPERTS),
    "gemma": Family("gemma", "GemmaForCausalLM", norms_plus_one=True),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", _SANDWICH_NORMS, norms_plus_one=True),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", {**_QK_NORMS, **_SANDWICH_NORMS}, norms_plus_one=True),
    "phi3": Family("phi3", "Phi3ForCausalLM", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The counts that names and permutations depend on, per layer."""

    num_heads: list[int]
    num_kv_heads: list[int]

    @property
    def num_layers(self) -> int:
        return len(self.num_heads)


def translate(tensors: list[tuple[Path, GgufTensor]], family: Family, layout: Layout) -> dict[str, TensorEntry]:
    """Hugging Face name -> entry. Raises CheckpointError for a tensor the family does not have."""
    out: dict[str, TensorEntry] = {}
    for path, tensor in tensors:
        if ROTARY.fullmatch(tensor.name):
            continue
        for entry in _entries(path, tensor, family, layout):
            out[entry.name] = entry
    return out


def _entries(path: Path, tensor: GgufTensor, family: Family, layout: Layout) -> list[TensorEntry]:
    plain = TensorEntry(tensor.name, path, tensor.kind, tensor.shape, tensor.offset, tensor.nbytes, tensor.name)
    top = _TOP_NAME.fullmatch(tensor.name)
    if top and top[1] in _TOP:
        added = 1.0 if family.norms_plus_one and top[1] == "output_norm" else 0.0
        return [replace(plain, name=f"{_TOP[top[1]]}.{top[2]}", added=added)]
    block = _BLOCK_NAME.fullmatch(tensor.name)
    if not block or int(block[1]) >= layout.num_layers:
        raise _unknown(path, tensor.name, family)
    layer, what, suffix = int(block[1]), block[2], block[3]
    if what in family.experts:
        return _unstack(plain, f"model.layers.{layer}.{family.expert_prefix}", f"{family.experts[what]}.{suffix}")
    known = {**_BLOCK, **family.names}
    if what not in known:
        raise _unknown(path, tensor.name, family)
    return [
        replace(
            plain,
            name=f"model.layers.{layer}.{known[what]}.{suffix}",
            permuted_heads=_permuted(what, layer, layout) if family.permuted else None,
            added=1.0 if family.norms_plus_one and what.endswith("norm") else 0.0,
        )
    ]


def _permuted(what: str, layer: int, layout: Layout) -> int | None:
    return {"attn_q": layout.num_heads[layer], "attn_k": layout.num_kv_heads[layer]}.get(what)


def _unstack(stacked: TensorEntry, prefix: str, suffix: str) -> list[TensorEntry]:
    """Experts are stacked along the slowest dimension, so each is a run of bytes of its own."""
    num_experts, *shape = stacked.shape
    nbytes = stacked.nbytes // num_experts
    return [
        replace(
            stacked,
            name=f"{prefix}.{i}.{suffix}",
            shape=tuple(shape),
            offset=stacked.offset + i * nbytes,
            nbytes=nbytes,
            source_name=f"{stacked.source_name}[{i}]",
        )
        for i in range(num_experts)
    ]


def _unknown(path: Path, name: str, family: Family) -> CheckpointError:
    return CheckpointError(f"{path}: tensor '{name}' is not one of a {family.model_type} model's")
