"""Published models by name: the fields of their config.json that decide cost. A table, nothing else.

A row is (model_type, hidden, inner, layers, heads, KV heads, vocabulary, longest context) and what else differs
from the family's defaults. Where a family has a head_dim of its own it stands in the row: it is not hidden / heads.
"""

from __future__ import annotations

from typing import Any

from steelyard.errors import NotFound

_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_Row = tuple[str, int, int, int, int, int, int, int]

_TIED = {"tie_word_embeddings": True}
_DIM = {"head_dim": 128}
_QWEN3_MOE = {**_DIM, "num_experts": 128, "num_experts_per_tok": 8}
_GPT_OSS: dict[str, Any] = {"head_dim": 64, "sliding_window": 128, "attention_bias": True, "num_experts_per_tok": 4}
_GPT_OSS |= {"quantization_config": {"quant_method": "mxfp4"}}
_V2: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_V2 |= {"n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
_V3: dict[str, Any] = {
    **_V2,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
}
_V3 |= {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "quantization_config": {"quant_method": "fp8"}}
_K2: dict[str, Any] = {**_V3, "n_routed_experts": 384, "first_k_dense_replace": 1}


def _gemma(head_dim: int, window: int) -> dict[str, Any]:
    return {"head_dim": head_dim, "sliding_window": window, **_TIED}


_TABLE: dict[str, tuple[_Row, dict[str, Any]]] = {
    "llama-2-7b": (("llama", 4096, 11008, 32, 32, 32, 32000, 4096), {}),
    "llama-2-13b": (("llama", 5120, 13824, 40, 40, 40, 32000, 4096), {}),
    "llama-2-70b": (("llama", 8192, 28672, 80, 64, 8, 32000, 4096), {}),
    "llama-3-8b": (("llama", 4096, 14336, 32, 32, 8, 128256, 8192), {}),
    "llama-3-70b": (("llama", 8192, 28672, 80, 64, 8, 128256, 8192), {}),
    "llama-3.1-8b": (("llama", 4096, 14336, 32, 32, 8, 128256, 131072), {}),
    "llama-3.1-70b": (("llama", 8192, 28672, 80, 64, 8, 128256, 131072), {}),
    "llama-3.1-405b": (("llama", 16384, 53248, 126, 128, 8, 128256, 131072), {}),
    "llama-3.2-1b": (("llama", 2048, 8192, 16, 32, 8, 128256, 131072), {**_TIED, "head_dim": 64}),
    "llama-3.2-3b": (("llama", 3072, 8192, 28, 24, 8, 128256, 131072), {**_TIED, **_DIM}),
    "llama-3.3-70b": (("llama", 8192, 28672, 80, 64, 8, 128256, 131072), {}),
    "mistral-7b-v0.1": (("mistral", 4096, 14336, 32, 32, 8, 32000, 32768), {"sliding_window": 4096}),
    "mistral-7b-v0.3": (("mistral", 4096, 14336, 32, 32, 8, 32768, 32768), {}),
    "mistral-nemo-12b": (("mistral", 5120, 14336, 40, 32, 8, 131072, 131072), _DIM),
    "mistral-small-24b": (("mistral", 5120, 32768, 40, 32, 8, 131072, 32768), _DIM),
    "mixtral-8x7b": (("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768), {"num_local_experts": 8}),
    "mixtral-8x22b": (("mixtral", 6144, 16384, 56, 48, 8, 32768, 65536), {"num_local_experts": 8}),
    "qwen-72b": (("qwen2", 8192, 24576, 80, 64, 64, 152064, 32768), {}),
    "qwen2.5-0.5b": (("qwen2", 896, 4864, 24, 14, 2, 151936, 32768), _TIED),
    "qwen2.5-1.5b": (("qwen2", 1536, 8960, 28, 12, 2, 151936, 32768), _TIED),
    "qwen2.5-3b": (("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768), _TIED),
    "qwen2.5-7b": (("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768), {}),
    "qwen2.5-14b": (("qwen2", 5120, 13824, 48, 40, 8, 152064, 32768), {}),
    "qwen2.5-32b": (("qwen2", 5120, 27648, 64, 40, 8, 152064, 32768), {}),
    "qwen2.5-72b": (("qwen2", 8192, 29568, 80, 64, 8, 152064, 32768), {}),
    "qwen3-0.6b": (("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960), {**_TIED, **_DIM}),
    "qwen3-1.7b": (("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960), {**_TIED, **_DIM}),
    "qwen3-4b": (("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960), {**_TIED, **_DIM}),
    "qwen3-8b": (("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960), _DIM),
    "qwen3-14b": (("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960), _DIM),
    "qwen3-32b": (("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960), _DIM),
    "qwen3-30b-a3b": (
        ("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960),
        {**_QWEN3_MOE, "moe_intermediate_size": 768},
    ),
    "qwen3-235b-a22b": (
        ("qwen3_moe", 4096, 12288, 94, 64, 4, 151936, 40960),
        {**_QWEN3_MOE, "moe_intermediate_size": 1536},
    ),
    "gemma-2-2b": (("gemma2", 2304, 9216, 26, 8, 4, 256000, 8192), _gemma(256, 4096)),
    "gemma-2-9b": (("gemma2", 3584, 14336, 42, 16, 8, 256000, 8192), _gemma(256, 4096)),
    "gemma-2-27b": (("gemma2", 4608, 36864, 46, 32, 16, 256000, 8192), _gemma(128, 4096)),
    "gemma-3-1b": (("gemma3_text", 1152, 6912, 26, 4, 1, 262144, 32768), _gemma(256, 512)),
    "gemma-3-4b": (("gemma3_text", 2560, 10240, 34, 8, 4, 262208, 131072), _gemma(256, 1024)),
    "gemma-3-12b": (("gemma3_text", 3840, 15360, 48, 16, 8, 262208, 131072), _gemma(256, 1024)),
    "gemma-3-27b": (("gemma3_text", 5376, 21504, 62, 32, 16, 262208, 131072), _gemma(128, 1024)),
    "phi-3-mini": (("phi3", 3072, 8192, 32, 32, 32, 32064, 4096), {"sliding_window": 2047}),
    "phi-4": (("phi3", 5120, 17920, 40, 40, 10, 100352, 16384), {}),
    "olmo-2-7b": (("olmo2", 4096, 11008, 32, 32, 32, 100352, 4096), {}),
    "olmo-2-13b": (("olmo2", 5120, 13824, 40, 40, 40, 100352, 4096), {}),
    "olmoe-1b-7b": (("olmoe", 2048, 1024, 16, 16, 16, 50304, 4096), {"num_experts": 64, "num_experts_per_tok": 8}),
    "granite-3.3-8b": (("granite", 4096, 12800, 40, 32, 8, 49159, 131072), _TIED),
    "smollm2-135m": (("llama", 576, 1536, 30, 9, 3, 49152, 8192), _TIED),
    "smollm2-360m": (("llama", 960, 2560, 32, 15, 5, 49152, 8192), _TIED),
    "smollm2-1.7b": (("llama", 2048, 8192, 24, 32, 32, 49152, 8192), _TIED),
    "smollm3-3b": (("smollm3", 2048, 11008, 36, 16, 4, 128256, 65536), _TIED),
    "deepseek-v2-lite": (
        ("deepseek_v2", 2048, 10944, 27, 16, 16, 102400, 163840),
        {**_V2, "q_lora_rank": None, "n_routed_experts": 64, "moe_intermediate_size": 1408},
    ),
    "deepseek-v2": (
        ("deepseek_v2", 5120, 12288, 60, 128, 128, 102400, 163840),
        {**_V2, "q_lora_rank": 1536, "n_routed_experts": 160, "moe_intermediate_size": 1536},
    ),
    "deepseek-v3": (("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, 163840), _V3),
    "deepseek-r1": (("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, 163840), _V3),
    "kimi-k2": (("deepseek_v3", 7168, 18432, 61, 64, 64, 163840, 131072), _K2),
    "gpt-oss-20b": (("gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072), {**_GPT_OSS, "num_local_experts": 32}),
    "gpt-oss-120b": (("gpt_oss", 2880, 2880, 36, 64, 8, 201088, 131072), {**_GPT_OSS, "num_local_experts": 128}),
    "opt-13b": (("opt", 5120, 20480, 40, 40, 40, 50272, 2048), {"ffn_dim": 20480, "word_embed_proj_dim": 5120}),
    "opt-66b": (("opt", 9216, 36864, 64, 72, 72, 50272, 2048), {"ffn_dim": 36864, "word_embed_proj_dim": 9216}),
    "opt-175b": (("opt", 12288, 49152, 96, 96, 96, 50272, 2048), {"ffn_dim": 49152, "word_embed_proj_dim": 12288}),
}

PRESETS: tuple[str, ...] = tuple(_TABLE)
"""Names of all presets."""

# llama3-8b is a benchmark's name (perf/workloads.json): its config has Llama 3.1's longest context.
_SAME = {"smollm2": "smollm2-135m", "mistral-7b": "mistral-7b-v0.1", "mixtral": "mixtral-8x7b"}
_SAME |= {"llama3-8b": "llama-3.1-8b", "qwen1.5-72b": "qwen-72b", "olmo-2-1124-7b": "olmo-2-7b"}
_ENDINGS = ("-instruct", "-it", "-chat", "-hf", "-base", "-pt", "-4k", "-2407", "-2501", "-0924", "-it-qat")


def preset_name(model: str) -> str | None:
    """The preset that a name or hub id means, or None. An owner, "meta-" and endings like "-Instruct" are ignored."""
    name = model.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    tried = [name]
    while any(name.endswith(e) for e in _ENDINGS):
        name = next(name.removesuffix(e) for e in _ENDINGS if name.endswith(e))
        tried.append(name)
    return next((n for n in (_SAME.get(t, t) for t in tried) if n in _TABLE), None)


def preset_config(model: str) -> dict[str, Any]:
    """A config.json-like dict for `model`. Raises NotFound with the known names."""
    name = preset_name(model)
    if name is None:
        raise NotFound(f"model {model!r} is no preset; presets are {', '.join(PRESETS)}", param="model")
    row, rest = _TABLE[name]
    return dict(zip(_KEYS, row)) | rest | {"torch_dtype": "bfloat16", "_name_or_path": name}
