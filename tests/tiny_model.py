"""A tiny random Llama on disk, with a byte-level BPE tokenizer and a ChatML-like template: for servers under test.

The weights are wide, so that the best two logits of a position are far apart and greedy text does not hang on the
last bit of a sum.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
MAX_MODEL_LEN = 2048
BOS, IM_START, IM_END = "<|bos|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if loop.index0 > 0 and message.role == 'user' and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('two user turns in a row') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = [
    "The sea is wide and the ship is small; the wind comes from the north, and one two three four five sail on.",
    "STOP is a word. Stop strings stop a text, and the stopping of a text is not the end of the story, said the cook.",
]


def write(folder: Path, seed: int = 0) -> Path:
    """Write the model's files into `folder`, which is made if it is missing; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(seed), folder / "model.safetensors")
    return folder


def _weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float) -> np.ndarray:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, 64, std=1.0),
        "model.norm.weight": np.ones(64, np.float32),
        "lm_head.weight": normal(VOCAB_SIZE, 64, std=1.0),
    }
    for i in range(2):
        prefix = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", 64, 64),
            ("self_attn.k_proj", 32, 64),
            ("self_attn.v_proj", 32, 64),
            ("self_attn.o_proj", 64, 64),
            ("mlp.gate_proj", 128, 64),
            ("mlp.up_proj", 128, 64),
            ("mlp.down_proj", 64, 128),
        ):
            weights[f"{prefix}{name}.weight"] = normal(rows, columns, std=0.2)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = np.ones(64, np.float32)
    return weights


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": IM_END,
        "add_bos_token": True,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
