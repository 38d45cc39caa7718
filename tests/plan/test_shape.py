"""Parameters and KV bytes equal the published models exactly; the usual confusions would change these numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.step import KvGroup
from steelyard.errors import CheckpointError, NotFound, StartError
from steelyard.perf import workloads
from steelyard.plan.presets import PRESETS, preset_config, preset_name
from steelyard.plan.shape import ModelShape

GIB = 2**30

DENSE = {  # parameters, bf16 GB, KV bytes a token in bf16
    "llama-2-7b": (6_738_415_616, 13.48, 524_288),
    "llama-2-13b": (13_015_864_320, 26.03, 819_200),
    "llama-2-70b": (68_976_648_192, 137.95, 327_680),
    "llama-3-8b": (8_030_261_248, 16.06, 131_072),
    "llama-3.1-8b": (8_030_261_248, 16.06, 131_072),
    "llama-3.1-70b": (70_553_706_496, 141.11, 327_680),
    "llama-3.2-1b": (1_235_814_400, 2.47, 32_768),
    "mistral-7b-v0.1": (7_241_732_096, 14.48, 131_072),
    "qwen2.5-0.5b": (494_032_768, 0.99, 12_288),
    "qwen2.5-3b": (3_085_938_688, 6.17, 36_864),
    "qwen2.5-7b": (7_615_616_512, 15.23, 57_344),
    "qwen2.5-32b": (32_763_876_352, 65.53, 262_144),
    "qwen2.5-72b": (72_706_203_648, 145.41, 327_680),
    "qwen3-0.6b": (596_049_920, 1.19, 114_688),
    "qwen3-1.7b": (1_720_574_976, 3.44, 114_688),
    "qwen3-4b": (4_022_468_096, 8.04, 147_456),
    "qwen3-8b": (8_190_735_360, 16.38, 147_456),
    "qwen3-32b": (32_762_123_264, 65.52, 262_144),
    "phi-3-mini": (3_821_079_552, 7.64, 393_216),
    "gemma-2-2b": (2_614_341_888, 5.23, 106_496),
    "gemma-2-9b": (9_241_705_984, 18.48, 344_064),
    "gemma-3-1b": (999_885_952, 2.00, 26_624),
    "gemma-3-4b": (3_880_263_168, 7.76, 139_264),
    "gemma-3-27b": (27_009_346_304, 54.02, 507_904),
}
SPARSE = {  # parameters, active parameters, KV bytes a token
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248, 131_072),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704, 98_304),
    "deepseek-v2": (235_741_434_880, 21.38e9, 69_120),
    "deepseek-v3": (671_026_419_200, 37.55e9, 70_272),
    "deepseek-r1": (671_026_419_200, 37.55e9, 70_272),
}
WINDOWED = {  # GiB at 8k, 32k, 128k; the same if every layer were full
    "gemma-2-9b": ((1.969, 5.906, 21.656), (2.625, 10.5, 42.0)),
    "gemma-3-1b": ((0.042, 0.136, 0.511), None),
    "gemma-3-4b": ((0.270, 0.738, 2.613), (1.062, 4.25, 17.0)),
    "gemma-3-27b": ((1.031, 2.906, 10.406), (3.875, 15.5, 62.0)),
    "gpt-oss-120b": ((0.286, 1.129, 4.504), None),
}
FIVE = {  # GiB of one sequence at 512, 2k, 4k, 8k, 32k, 128k tokens
    "llama-2-7b": (0.25, 1.0, 2.0, 4.0, 16.0, 64.0),
    "llama-2-13b": (0.390625, 1.5625, 3.125, 6.25, 25.0, 100.0),
    "llama-2-70b": (0.15625, 0.625, 1.25, 2.5, 10.0, 40.0),
    "qwen-72b": (1.25, 5.0, 10.0, 20.0, 80.0, 320.0),
    "mixtral-8x7b": (0.0625, 0.25, 0.5, 1.0, 4.0, 16.0),
}


def shape(name: str, **changed: object) -> ModelShape:
    return ModelShape.from_config(preset_config(name) | changed)


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_have_their_published_size(name: str) -> None:
    parameters, gigabytes, kv = DENSE[name]
    model = shape(name)
    assert model.parameters == model.active_parameters == parameters
    assert round(model.weight_bytes("bfloat16") / 1e9, 2) == gigabytes
    assert model.weight_bytes("bfloat16") == 2 * parameters
    assert model.kv_bytes_per_token(2) == kv
    assert model.kv_bytes_per_token(1) * 2 == kv


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_models_have_their_published_total_and_active_size(name: str) -> None:
    parameters, active, kv = SPARSE[name]
    model = shape(name)
    assert model.parameters == parameters
    if isinstance(active, int):
        assert model.active_parameters == active
    else:
        assert round(model.active_parameters / 1e9, 2) == active / 1e9
    assert model.kv_bytes_per_token() == kv


def test_gpt_oss_counts_active_without_the_input_embedding_and_kv_beyond_its_windows() -> None:
    model = shape("gpt-oss-120b")
    assert model.parameters == 116_829_156_672
    assert model.active_read_parameters == 5_132_849_472
    assert model.active_parameters == 5_132_849_472 + 201_088 * 2_880
    assert model.kv_bytes_per_token() == 73_728
    assert model.kv_bytes_per_token_beyond() == 36_864


def test_a_published_checkpoint_size_is_met_by_its_native_format() -> None:
    assert shape("gpt-oss-120b").native_format == "mxfp4"
    assert 65.2e9 < shape("gpt-oss-120b").weight_bytes("mxfp4") < 65.3e9


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_cap_what_a_sequence_keeps(name: str) -> None:
    capped, full = WINDOWED[name]
    model = shape(name)
    assert tuple(round(model.kv_bytes_per_sequence(n) / GIB, 3) for n in (8192, 32768, 131072)) == capped
    if full:
        assert tuple(round(model.kv_bytes_per_token() * n / GIB, 3) for n in (8192, 32768, 131072)) == full


@pytest.mark.parametrize("name", FIVE)
def test_kv_table_of_five_models_and_six_lengths(name: str) -> None:
    lengths = (512, 2048, 4096, 8192, 32768, 131072)
    assert tuple(shape(name).kv_bytes_per_sequence(n) / GIB for n in lengths) == FIVE[name]


def test_qwen3_4b_by_hand() -> None:
    model = shape("qwen3-4b")
    assert model.kv_bytes_per_token() == 2 * 36 * 8 * 128 * 2 == 147_456
    assert model.kv_bytes_per_sequence(8192) == 1.125 * GIB
    assert 16 * model.kv_bytes_per_sequence(8192) == 18 * GIB


class TestCommonConfusions:
    """Each names a wrong reading that another planner has shipped, and shows that the right one differs."""

    def test_query_heads_are_not_kv_heads(self) -> None:
        model = shape("llama-3.1-8b")
        wrong = 2 * 32 * model.num_heads * model.head_dim * 2
        assert wrong == 4 * model.kv_bytes_per_token()

    def test_head_dim_is_not_hidden_over_heads(self) -> None:
        for name in ("qwen3-0.6b", "gemma-2-9b", "gpt-oss-120b", "mistral-nemo-12b", "gemma-3-27b"):
            model = shape(name)
            assert model.head_dim != model.hidden_size // model.num_heads
        assert shape("llama-3.1-8b", head_dim=None).head_dim == 128  # the fallback, where the field is null

    def test_a_latent_is_neither_doubled_nor_per_head(self) -> None:
        model = shape("deepseek-v3")
        assert model.kv_bytes_per_token() == (512 + 64) * 61 * 2
        assert 2 * 61 * 128 * 128 * 2 == 3_997_696 > 50 * model.kv_bytes_per_token()

    def test_active_is_not_total(self) -> None:
        model = shape("mixtral-8x7b")
        assert model.parameters > 3.6 * model.active_parameters
        assert model.weight_bytes() == 2 * model.parameters

    def test_a_tied_head_is_counted_once_but_read_as_head(self) -> None:
        model = shape("qwen3-0.6b")
        untied = shape("qwen3-0.6b", tie_word_embeddings=False)
        assert untied.parameters - model.parameters == model.vocab_size * model.hidden_size
        assert model.read_parameters == model.parameters == untied.read_parameters

    def test_a_window_that_is_not_used_caps_nothing(self) -> None:
        model = shape("qwen2.5-7b", sliding_window=131072, use_sliding_window=False, max_window_layers=28)
        assert model.kv_groups() == (KvGroup(28, None),)


def test_layer_types_decide_windows_where_present() -> None:
    types = ["full_attention"] + ["sliding_attention"] * 25
    model = shape("gemma-3-1b", layer_types=types)
    assert model.kv_groups() == (KvGroup(1, None), KvGroup(25, 512))
    assert model.group_layers() == ((0,), tuple(range(1, 26)))


def test_the_text_part_of_a_multimodal_config_is_read_with_the_familys_defaults() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    model = ModelShape.from_config({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert model.parameters == 3_880_263_168
    assert [g.num_layers for g in model.kv_groups()] == [29, 5]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_divides_heads_and_matrices(tp: int) -> None:
    model = shape("llama-3.1-70b")
    assert model.kv_bytes_per_token(2, tp) * tp == model.kv_bytes_per_token(2)
    norms = (2 * 80 + 1) * 8192  # on every rank
    assert tp * model.weight_bytes(tp=tp) == model.weight_bytes() + (tp - 1) * 2 * norms


@given(st.sampled_from(PRESETS), st.sampled_from([2, 4, 8, 16]), st.integers(1, 200_000))
@settings(max_examples=80)
def test_ranks_together_hold_the_whole_model_and_no_rank_holds_more_than_its_part(
    name: str, tp: int, context_len: int
) -> None:
    model = shape(name)
    try:
        model.check_tp(tp)
    except StartError:
        assert model.num_heads % tp or (model.num_kv_heads % tp and tp % model.num_kv_heads)
        return
    whole, rank = model.weight_bytes(), model.weight_bytes(tp=tp)
    assert whole / tp <= rank < whole
    kv, kv_rank = (model.kv_bytes_per_sequence(context_len, tp=n) for n in (1, tp))
    ways = 1 if model.is_latent else min(tp, model.num_kv_heads)
    assert kv_rank * ways == kv


def test_kv_heads_are_replicated_beyond_their_number_and_a_latent_always() -> None:
    model = shape("qwen2.5-32b", num_attention_heads=64, num_key_value_heads=4, head_dim=80)
    assert model.kv_bytes_per_token(2, 4) == model.kv_bytes_per_token(2, 8) == model.kv_bytes_per_token(2) // 4
    latent = shape("deepseek-v3")
    assert latent.kv_bytes_per_token(2, 8) == latent.kv_bytes_per_token(2)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"model_type": "mamba"}, "model_type"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_a_bad_config_names_its_field(changed: dict[str, object], field: str) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        shape("llama-3.1-8b", **changed)
    assert caught.value.param == field


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(StartError, match="28 heads"):
        shape("qwen2.5-7b").weight_bytes(tp=8)
    with pytest.raises(StartError, match="4 KV heads"):
        shape("qwen2.5-7b", num_attention_heads=24).weight_bytes(tp=3)


@pytest.mark.parametrize("name", json.loads(workloads.FILE.read_text())["models"])
def test_a_workloads_model_is_planned_by_its_name_as_the_config_that_is_measured(name: str) -> None:
    measured = ModelShape.from_config(workloads.model_config(name) or {}, name)
    assert replace(shape(name), name=name) == measured


def test_every_preset_can_be_read_and_found_by_hub_id() -> None:
    for name in PRESETS:
        assert ModelShape.from_config(preset_config(name)).parameters > 10**8
    assert preset_name("meta-llama/Meta-Llama-3.1-8B-Instruct") == "llama-3.1-8b"
    assert preset_name("Qwen/Qwen3-30B-A3B") == "qwen3-30b-a3b"
    assert preset_name("nobody/nothing-7b") is None
    with pytest.raises(NotFound, match=r"llama-2-7b.*qwen3-8b"):
        preset_config("nothing-7b")
