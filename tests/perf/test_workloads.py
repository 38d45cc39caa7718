"""Workloads: the same requests every time, named cases, models with a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.checkpoint.find import open_checkpoint
from steelyard.errors import InvalidRequest
from steelyard.perf.workloads import case_names, find_case, model_config, write_config
from steelyard.plan.shape import ModelShape


def test_cases_have_the_lengths_they_are_named_for() -> None:
    assert case_names("single") == ["single 128/257", "single 4096/257"] and len(case_names("offline")) == 5
    case = find_case("short-long")
    assert case.name == "short-long 256/1024" and case.lens == ((256, 1024),) * 512 and case.output_tokens == 512 * 1024
    mixed = find_case("mixed 100-1024/100-1024")
    assert len(mixed.lens) == 256 and len(set(mixed.lens)) > 200
    assert all(100 <= n <= 1024 for pair in mixed.lens for n in pair)


def test_a_name_and_a_vocabulary_give_the_same_ids_every_time() -> None:
    case = find_case("mixed").scaled(0.02)
    prompts = case.prompts(5000)
    assert prompts == find_case("mixed").prompts(5000)[: len(prompts)]
    assert [len(p) for p in prompts] == [num_prompt for num_prompt, _ in case.lens]
    assert max(max(p) for p in prompts) < 4000 and prompts[0] != prompts[1]


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="short-short 256/128"):
        find_case("short-s-nothing")
    with pytest.raises(InvalidRequest, match=r"qwen3-0\.6b"):
        write_config("no-such-model", tmp_path)


@pytest.mark.parametrize(("name", "layers"), [("llama3-8b", 32), ("qwen3-0.6b", 28), ("qwen2.5-7b", 28)])
def test_a_model_of_the_file_or_a_preset_becomes_a_config_alone(name: str, layers: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_config(name, tmp_path)), "dummy")
    assert ModelShape.from_config(checkpoint.config).num_layers == layers and not checkpoint.tensors
    assert model_config("nothing of the kind") is None
