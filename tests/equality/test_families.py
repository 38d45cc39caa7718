"""Every family and every rotary scheme, tiny and random, against transformers: chunked, batched, past the window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from steelyard.core.sampling import SamplingParams
from steelyard.errors import CheckpointError
from steelyard.kernels.reference import ReferenceBackend
from steelyard.layers.linear import Place
from steelyard.llm import LLM
from steelyard.models.decoder import Decoder
from steelyard.models.families import decoder_config
from steelyard.plan.shape import ModelShape
from tests.equality.llama_rig import VOCAB, Cell, Ran, check_greedy, prompts, request, run, runner_of

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LONG = {"factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 20, "sliding_window_pattern": 2}),
    "phi3": ("Phi3", {}),
    "phi3-partial": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0, 1]}),
    "mistral-pruned-heads": (
        "Mistral",
        {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 12, "sliding_window": None},
    ),
    "qwen3-pruned-heads": ("Qwen3", {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 6}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None, **EXPERTS}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True, **EXPERTS},
    ),
    "qwen3-moe-some": (
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "mlp_only_layers": [1], **EXPERTS},
    ),
    "olmoe": ("Olmoe", {"num_experts": 4, **EXPERTS}),
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, **LONG},
    "yarn-mscale": {"rope_type": "yarn", "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.4, **LONG},
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}


def tiny(folder: Path, architecture: str, fields: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(11)
    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, **fields})
    model = getattr(transformers, f"{architecture.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms and biases start as ones and zeros, which would hide a missing one
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_knows_whose_layers_have_fused_products(name: str) -> None:
    architecture, fields = FAMILIES[name]
    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, **fields}).to_dict()
    place = Place(torch.float32, torch.device("cpu"), ReferenceBackend())
    layers = Decoder(decoder_config(config), place, 256).layers
    assert ModelShape.from_config(config).is_plain == all(layer._plain is not None for layer in layers)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_transformers(tmp_path: Path, name: str) -> None:
    oracle = tiny(tmp_path, *FAMILIES[name])
    requests = [request(f"r{i}", p, 30) for i, p in enumerate(prompts((5, 33, 16, 70)))]
    ran = run(tmp_path, Cell(budget=24, block_size=8, overlap=True), requests)
    ties = check_greedy(oracle, ran)
    assert ran.scheduler.counters.prefill_chunks > 4 and ties < 4
    windows = [g.window for g in ran.simulation.runner.caps.groups if g.window is not None]
    if "sliding_window" in str(FAMILIES[name]) and FAMILIES[name][1]["sliding_window"]:
        assert windows, "the family's window is used"
        freed = [e for plan in ran.simulation.plans for e in plan.edits if 0 in e.block_ids]
        assert freed, "blocks behind the window are freed"
        group = next(i for i, g in enumerate(ran.simulation.runner.caps.groups) if g.window is not None)
        # A window, the chunk it slides over, and a partly used block at each end.
        assert 0 < most_blocks_of_a_row(ran, group) <= -(-(windows[0] + 24) // 8) + 2


def most_blocks_of_a_row(ran: Ran, group: int) -> int:
    """The most blocks that a row's table of this KV group ever named at once (case S27)."""
    tables: dict[int, dict[int, int]] = {}
    most = 0
    for plan in ran.simulation.plans:
        for row in plan.leave:
            tables.pop(row, None)
        for edit in plan.edits:
            if edit.group == group:
                table = tables.setdefault(edit.row, {})
                table.update({edit.first_index + i: block for i, block in enumerate(edit.block_ids)})
                most = max(most, sum(block != 0 for block in table.values()))
    return most


def test_a_pruned_model_has_intermediate_sizes_of_its_own_in_every_layer(tmp_path: Path) -> None:
    sizes = [80, 24, 1, 56]
    oracle = tiny(tmp_path, "Llama", {})
    torch.manual_seed(3)
    for layer, size in zip(oracle.model.layers, sizes, strict=True):
        fields = {**oracle.config.to_dict(), "intermediate_size": size}
        layer.mlp = type(layer.mlp)(transformers.LlamaConfig(**fields)).eval()
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": sizes}))
    requests = [request(f"r{i}", p, 20) for i, p in enumerate(prompts((5, 33)))]
    assert check_greedy(oracle, run(tmp_path, Cell(budget=24), requests)) < 3


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe"])
def test_a_family_in_bfloat16_is_near_its_float32_self(tmp_path: Path, name: str) -> None:
    """The narrow path (fused products, KV in bfloat16) computes the same model: the same likelihood of its prompts."""
    tiny(tmp_path, *({"llama": ("Llama", {})} | FAMILIES)[name])
    requests = prompts((40, 9))
    found = []
    for dtype in ("float32", "bfloat16"):
        llm = LLM(str(tmp_path), dtype=dtype, skip_tokenizer_init=True, num_gpu_blocks_override=32)
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(requests, sampling)
        found.append([[p.logprob for p in out.prompt_logprobs or () if p is not None] for out in outputs])
    exact, narrow = (torch.tensor([p for prompt in prompts_ for p in prompt]) for prompts_ in found)
    assert len(exact) == 47 and not torch.equal(exact, narrow)
    assert (exact - narrow).abs().mean() < 0.05 * exact.abs().mean()


def test_an_unknown_rotary_scheme_is_refused_by_name(tmp_path: Path) -> None:
    tiny(tmp_path, "Llama", {})
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": {"rope_type": "warp", "factor": 2.0}}))
    with pytest.raises(CheckpointError, match="'warp' is not supported"):
        runner_of(tmp_path, Cell())


@pytest.mark.parametrize("max_model_len", [64, 256], ids=["short", "long"])
def test_longrope_equals_transformers(tmp_path: Path, max_model_len: int) -> None:
    """The factors are chosen by the longest sequence served; transformers chooses by the sequence at hand."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 3.5, 6.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    fields = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    oracle = tiny(tmp_path, "Phi3", fields)
    lens = (5, 33) if max_model_len == 64 else (80, 100)
    requests = [request(f"r{i}", p, 30) for i, p in enumerate(prompts(lens))]
    assert check_greedy(oracle, run(tmp_path, Cell(max_model_len=max_model_len), requests)) < 3


@pytest.mark.parametrize("name", ROPES)
def test_rotary_scheme_equals_transformers(tmp_path: Path, name: str) -> None:
    oracle = tiny(tmp_path, "Llama", {"rope_parameters": ROPES[name]})
    requests = [request(f"r{i}", p, 30) for i, p in enumerate(prompts((5, 33, 70)))]
    assert check_greedy(oracle, run(tmp_path, Cell(budget=24), requests)) < 4
