"""Names against the tables of the gguf library, which converters use the other way round."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from steelyard.checkpoint.find import open_checkpoint
from steelyard.checkpoint.gguf import GgufTensor, read_gguf
from steelyard.checkpoint.gguf_names import FAMILIES, Layout, translate
from steelyard.errors import CheckpointError
from tests.checkpoint.files import LLAMA_KEYS, llama_tensors, write_gguf

LAYERS = 2
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "num_local_experts": 3, "moe_intermediate_size": 16}


def hugging_face_names(model_type: str) -> set[str]:
    """Parameter names of a checkpoint on disk: what save_pretrained writes."""
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **(EXPERTS if "mo" in model_type else {}))
    if model_type == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=3)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return {n for n, _ in model.named_parameters() if "rotary" not in n}


DENSE = ["llama", "mistral", "granite", "smollm3", "qwen2", "qwen3", "olmo2", "gemma", "gemma2", "gemma3", "phi3"]


@pytest.mark.parametrize("arch", DENSE)
def test_names_are_the_converters_names_reversed(arch: str) -> None:
    family = FAMILIES[arch]
    file_arch = "llama" if arch == "mistral" else arch
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == file_arch)
    to_gguf = gguf.get_tensor_name_map(number, LAYERS)
    wanted = hugging_face_names(family.model_type)
    tensors = []
    for name in sorted(wanted):
        found = to_gguf.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, f"the gguf library does not know {name}"
        tensors.append((Path("f"), GgufTensor(found, "F32", (4, 4), 0, 64)))
    ours = translate(tensors, family, Layout([4] * LAYERS, [2] * LAYERS))
    assert set(ours) == wanted
    assert "model.layers.1.self_attn.o_proj.weight" in ours


@pytest.mark.parametrize(
    ("arch", "gate", "expert"),
    [
        ("mixtral", "block_sparse_moe.gate", "block_sparse_moe.experts.2.{}.weight"),
        ("qwen3moe", "mlp.gate", "mlp.experts.2.{}.weight"),
        ("olmoe", "mlp.gate", "mlp.experts.2.{}.weight"),
    ],
)
def test_stacked_experts_become_one_tensor_each(arch: str, gate: str, expert: str, tmp_path: Path) -> None:
    stacked = np.arange(3 * 4 * 8, dtype=np.float32).reshape(3, 4, 8)
    path = write_gguf(tmp_path / "m.gguf", tensors={"blk.0.ffn_down_exps.weight": stacked})
    (tensor,) = read_gguf(path).tensors
    router = GgufTensor("blk.0.ffn_gate_inp.weight", "F32", (3, 8), 0, 96)
    ours = translate([(path, tensor), (path, router)], FAMILIES[arch], Layout([4], [2]))
    entry = ours["model.layers.0." + expert.format("w2" if arch == "mixtral" else "down_proj")]
    assert f"model.layers.0.{gate}.weight" in ours
    assert len(ours) == 4
    assert entry.shape == (4, 8)
    raw = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    assert np.array_equal(np.frombuffer(raw, np.float32).reshape(4, 8), stacked[2])


def test_permuted_rows_are_undone_by_the_rule_their_entry_states(tmp_path: Path) -> None:
    """What llama.cpp's converter does to q and k of Llama, and the inverse as the entry describes it."""
    original = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    stored = original.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
    path = write_gguf(tmp_path / "m.gguf", keys=LLAMA_KEYS, tensors=llama_tensors() | {"blk.0.attn_q.weight": stored})
    found = open_checkpoint(str(path)).tensors
    entry = found["model.layers.0.self_attn.q_proj.weight"]
    assert entry.permuted_heads == 4
    assert found["model.layers.0.self_attn.k_proj.weight"].permuted_heads == 2
    assert found["model.layers.0.self_attn.v_proj.weight"].permuted_heads is None
    raw = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    rows = np.frombuffer(raw, np.float32).reshape(entry.permuted_heads, 8, 2, 64)
    assert np.array_equal(rows.swapaxes(1, 2).reshape(64, 64), original)


def test_gemmas_norms_are_marked_as_stored_plus_one() -> None:
    names = ["output_norm", "blk.0.attn_norm", "blk.0.attn_q_norm", "blk.0.post_ffw_norm", "blk.0.attn_q", "token_embd"]
    tensors = [(Path("f"), GgufTensor(f"{n}.weight", "F32", (8,), 0, 32)) for n in names]
    ours = translate(tensors, FAMILIES["gemma3"], Layout([4], [2]))
    assert {e.source_name: e.added for e in ours.values()} == {f"{n}.weight": float("norm" in n) for n in names}


@pytest.mark.parametrize("name", ["blk.0.ssm_in.weight", "blk.9.attn_q.weight", "whatever", "blk.0.attn_q.scale"])
def test_a_tensor_the_family_does_not_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        translate([(Path("f"), GgufTensor(name, "F32", (8,), 0, 32))], FAMILIES["llama"], Layout([4], [2]))
