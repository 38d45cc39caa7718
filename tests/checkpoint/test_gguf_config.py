from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from steelyard.checkpoint.find import open_checkpoint
from steelyard.errors import CheckpointError
from tests.checkpoint.files import LLAMA_KEYS, llama_tensors, write_gguf, write_llama

EMBEDDING = {"token_embd.weight": np.zeros((32, 64), np.float32)}
KEYS = LLAMA_KEYS | {"attention.key_length": 16, "attention.value_length": 16}
WINDOW = {"attention.sliding_window": 128}


def config(tmp_path: Path, arch: str, keys: dict[str, Any], **tensors: np.ndarray) -> dict[str, Any]:
    path = write_gguf(tmp_path / "m.gguf", arch=arch, keys=keys, tensors=EMBEDDING | tensors)
    return dict(open_checkpoint(str(path)).config)


@pytest.mark.parametrize(
    ("arch", "extra"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("gemma2", WINDOW), ("gemma3", WINDOW), ("phi3", {})],
)
def test_config_agrees_with_transformers_reading_of_the_same_file(
    arch: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    ours = config(tmp_path, arch, KEYS | extra)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()
    same = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ]
    same += ["sliding_window", "layer_types"] if extra else []
    assert {k: ours[k] for k in same} == {k: theirs[k] for k in same}
    assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"], rel=1e-6)
    assert ours["model_type"] == theirs["model_type"] or arch == "gemma3"


def test_a_config_is_accepted_by_the_class_it_names(tmp_path: Path) -> None:
    for arch in ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "olmo2", "smollm3"):
        ours = config(tmp_path, arch, KEYS | WINDOW if arch.startswith("gemma") else KEYS)
        made = transformers.AutoConfig.for_model(**ours, pad_token_id=0)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(made)
        assert type(model).__name__ == ours["architectures"][0]


def test_floats_are_the_decimals_somebody_wrote(tmp_path: Path) -> None:
    ours = config(tmp_path, "llama", KEYS | {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 500000.0})
    assert (ours["rms_norm_eps"], ours["rope_theta"]) == (1e-06, 500000.0)


def test_output_weights_are_tied_where_the_file_has_none(tmp_path: Path) -> None:
    assert config(tmp_path, "llama", KEYS)["tie_word_embeddings"] is True
    output = {"output.weight": np.zeros((32, 64), np.float32)}
    assert config(tmp_path, "llama", KEYS, **output)["tie_word_embeddings"] is False


def test_experts_and_windows_turn_llama_into_mixtral_and_mistral(tmp_path: Path) -> None:
    mixtral = config(tmp_path, "llama", KEYS | {"expert_count": 8, "expert_used_count": 2})
    assert (mixtral["model_type"], mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == ("mixtral", 8, 2)
    mistral = config(tmp_path, "llama", KEYS | WINDOW)
    assert (mistral["model_type"], mistral["sliding_window"]) == ("mistral", 128)


def test_gemma_layers_alternate_and_scale_by_the_head(tmp_path: Path) -> None:
    keys = KEYS | WINDOW | {"block_count": 12}
    two, three = (config(tmp_path, arch, keys) for arch in ("gemma2", "gemma3"))
    assert two["layer_types"][:3] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert [i for i, t in enumerate(three["layer_types"]) if t == "full_attention"] == [5, 11]
    assert two["query_pre_attn_scalar"] == three["query_pre_attn_scalar"] == 16
    assert (
        config(tmp_path, "gemma2", keys | {"block_count": 46, "embedding_length": 128})["query_pre_attn_scalar"]
        == 128 // 4
    )


def test_pruned_models_keep_their_counts_per_layer(tmp_path: Path) -> None:
    ours = config(tmp_path, "llama", KEYS | {"feed_forward_length": [96, 64], "attention.head_count_kv": [2, 1]})
    assert (ours["intermediate_size"], ours["num_key_value_heads"]) == ([96, 64], [2, 1])
    assert config(tmp_path, "llama", KEYS | {"feed_forward_length": [96, 96]})["intermediate_size"] == 96
    with pytest.raises(CheckpointError, match=r"feed_forward_length.*2 counts"):
        config(tmp_path, "llama", KEYS | {"feed_forward_length": [96]})


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length", "attention.head_count"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"llama.{key}"):
        config(tmp_path, "llama", {k: v for k, v in KEYS.items() if k != key})


def test_an_odd_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llama\.embedding_length.*not int"):
        config(tmp_path, "llama", KEYS | {"embedding_length": "64"})


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'mamba' is not supported"):
        config(tmp_path, "mamba", KEYS)


def llama3_factors(factor: float, context: int, dim: int = 16, theta: float = 10000.0) -> np.ndarray:
    """What a converter writes: unscaled over scaled frequencies of transformers' own rule."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": context,
    }
    made = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=dim, max_position_embeddings=65536, rope_parameters=scaling
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](made, torch.device("cpu"))
    plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return (plain / scaled).numpy().astype(np.float32)


def test_llama3_scaling_is_recognised_by_its_factors(tmp_path: Path) -> None:
    for factor in (8.0, 32.0):
        ours = config(tmp_path, "llama", KEYS, **{"rope_freqs.weight": llama3_factors(factor, 8192)})
        assert ours["rope_scaling"] == {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }


def test_other_factors_are_kept_as_they_are(tmp_path: Path) -> None:
    factors = llama3_factors(8.0, 100)
    ours = config(tmp_path, "llama", KEYS, **{"rope_freqs.weight": factors})["rope_scaling"]
    assert ours["rope_type"] == "longrope"
    assert np.array_equal(np.float32(ours["short_factor"]), factors)
    assert (ours["short_factor"], ours["attention_factor"]) == (ours["long_factor"], 1.0)


def test_phi3_long_factors(tmp_path: Path) -> None:
    long, short = (np.arange(1, 9, dtype=np.float32) * s for s in (4, 1))
    keys = KEYS | {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    factors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    ours = config(tmp_path, "phi3", keys, **factors)
    assert ours["rope_scaling"]["rope_type"] == "longrope"
    assert ours["rope_scaling"]["long_factor"] == list(long)
    assert ours["rope_scaling"]["short_factor"] == list(short)
    assert ours["rope_scaling"]["attention_factor"] == 1.25
    assert ours["original_max_position_embeddings"] == 64
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight' is missing"):
        config(tmp_path, "phi3", keys, **{"rope_factors_long.weight": long})
    with pytest.raises(CheckpointError, match=r"rope_factors_long\.weight' is F32 of shape"):
        config(tmp_path, "phi3", keys, **(factors | {"rope_factors_long.weight": long[:4]}))


def test_linear_and_yarn_scaling_and_an_unknown_one(tmp_path: Path) -> None:
    linear = KEYS | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert config(tmp_path, "llama", linear)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = KEYS | {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 24.0,
    }
    assert config(tmp_path, "qwen2", yarn)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 24.0,
    }
    with pytest.raises(CheckpointError, match="'warp' is not supported"):
        config(tmp_path, "llama", KEYS | {"rope.scaling.type": "warp"})


WORDS = ["<unk>", "<s>", "</s>", "a", "<|im_end|>", "<|eot_id|>"]


def test_every_end_token_the_vocabulary_has_ends_a_text(tmp_path: Path) -> None:
    vocabulary = {
        "ggml.model": "llama",
        "ggml.tokens": WORDS,
        "ggml.scores": [0.0] * 6,
        "ggml.token_type": [2, 3, 3, 1, 3, 1],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.eot_token_id": 3,
    }
    found = open_checkpoint(str(write_llama(tmp_path / "m.gguf", vocabulary)))
    # Named: 2 and 3. Known by its text: 4. Token 5 looks like one and is not a control token.
    assert found.eos_token_ids == {2, 3, 4}
    assert found.bos_token_id == 1
    assert found.tokenizer and found.tokenizer.add_bos


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    path = write_gguf(tmp_path / "m.gguf", keys=KEYS, metadata=metadata, tensors=llama_tensors())
    assert open_checkpoint(str(path)).generation_config == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.scores": [0.0] * 5}, "scores' has 5 entries for 6 tokens"),
        ({"ggml.token_type": ["a"] * 6}, "token_type' is not an array of int"),
        ({"ggml.tokens": WORDS * 9}, "54 tokens and an embedding of 32 rows"),
        ({"chat_template": 3}, "chat_template' is not a string"),
    ],
)
def test_a_damaged_vocabulary_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    vocabulary = {"ggml.model": "llama", "ggml.tokens": WORDS, "ggml.scores": [0.0] * 6} | change
    metadata = {f"tokenizer.{k}": v for k, v in vocabulary.items()}
    path = write_gguf(tmp_path / "m.gguf", keys=KEYS, metadata=metadata, tensors=llama_tensors())
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path))
