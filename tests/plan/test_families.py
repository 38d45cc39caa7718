"""Every family counted tensor by tensor equals the model that transformers builds from the same config."""

from __future__ import annotations

import pytest

from steelyard.plan.families import FAMILIES
from steelyard.plan.presets import PRESETS, preset_config
from steelyard.plan.shape import ModelShape

# Small configs with every tensor a family can have, sizes chosen so that no two kinds of tensor are alike.
SMALL = {
    "vocab_size": 1009,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 56}
EXTRA: dict[str, dict[str, object]] = {
    "phi3": {"head_dim": 16},
    "opt": {"ffn_dim": 208, "num_key_value_heads": 6, "head_dim": 16, "word_embed_proj_dim": 96},
    "gemma2": {"sliding_window": 128},
    "gemma3_text": {"sliding_window": 128},
    "olmo3": {"sliding_window": 128},
    "cohere2": {"sliding_window": 128},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
    "qwen2": {"head_dim": 16},
    "qwen2_moe": _MOE
    | {"num_experts": 6, "shared_expert_intermediate_size": 72, "mlp_only_layers": [1], "head_dim": 16},
    "qwen3_moe": _MOE | {"num_experts": 6, "decoder_sparse_step": 2},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 128, "attention_bias": True},
}
_LATENT = {"q_lora_rank": 40, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20}
_LATENT |= {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 6,
    "n_group": 2,
}
_LATENT |= {"topk_group": 1, "head_dim": 8}
EXTRA["deepseek_v2"] = _MOE | _LATENT
EXTRA["deepseek_v3"] = _MOE | _LATENT
EXTRA["olmo2"] = {"head_dim": 16}
EXTRA["granite"] = EXTRA["smollm3"] = {"head_dim": 16}

VARIANTS: dict[str, dict[str, object]] = {
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3 with bias": {"model_type": "qwen3", "attention_bias": True},
    "deepseek without query latent": {"model_type": "deepseek_v2", **EXTRA["deepseek_v2"], "q_lora_rank": None},
}
CASES = {name: {"model_type": name} | EXTRA.get(name, {}) for name in FAMILIES} | VARIANTS


def counted_by_transformers(config: dict[str, object]) -> int:
    import torch
    import transformers

    rest = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config", "_name_or_path")}
    hf = transformers.AutoConfig.for_model(str(config["model_type"]), **rest)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf)
    model.tie_weights()
    corrections = sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    return sum(p.numel() for p in model.parameters()) + corrections


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_family_has_the_tensors_that_transformers_gives_it(name: str) -> None:
    config = SMALL | CASES[name]
    assert ModelShape.from_config(config).parameters == counted_by_transformers(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_model_that_transformers_builds(name: str) -> None:
    config = preset_config(name)
    assert ModelShape.from_config(config).parameters == counted_by_transformers(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss", "cohere2", "olmo3", "qwen2"])
def test_windows_lie_where_transformers_puts_them(name: str) -> None:
    import transformers

    config = SMALL | {"num_hidden_layers": 13} | CASES[name]
    if name == "qwen2":
        config |= {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 5}
    rest = {k: v for k, v in config.items() if k != "model_type"}
    types = transformers.AutoConfig.for_model(name, **rest).layer_types
    ours = [layer.attention.window for layer in ModelShape.from_config(config).layers]
    assert ours == [128 if t == "sliding_attention" else None for t in types]
    assert 128 in ours and None in ours
