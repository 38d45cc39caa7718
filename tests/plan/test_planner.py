"""The whole plan: what is stored counts, what is unknown is said, and the parts agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.plan.device import find_device
from steelyard.plan.formats import weight_format
from steelyard.plan.memory import GIB
from steelyard.plan.models import PlannedModel, find_model
from steelyard.plan.planner import Options, make_plan

H200 = Options(find_device("H200"))


def test_weights_on_disk_count_as_they_are_until_another_format_or_a_split_is_asked_for() -> None:
    mixed = replace(find_model("llama-3.1-8b"), stored=weight_format("q4_k"), stored_bytes=5 * GIB)
    assert make_plan(mixed, H200).budget.weights_bytes == 5 * GIB
    assert make_plan(mixed, replace(H200, dtype="bfloat16")).budget.weights_bytes == 16_060_522_496
    half = make_plan(mixed, replace(H200, tp=2)).budget.weights_bytes
    assert half == mixed.shape.weight_bytes("q4_k", 2) < 3 * GIB


def test_the_tables_agree_with_the_memory_they_stand_beside() -> None:
    for name in ("llama-3.1-8b", "gemma-3-27b"):
        plan = make_plan(find_model(name), replace(H200, contexts=(4096, 32768), batches=(1, 64, 128, 256)))
        held = {c: plan.pools.sequences_in(plan.budget.kv_bytes, c) for c in (4096, 32768)}
        assert [row.fits for row in plan.decodes] == [row.batch <= held[row.context_len] for row in plan.decodes]
        assert {True, False} == {row.fits for row in plan.decodes}
        assert plan.max_sequences <= held[4096] < plan.max_sequences * 1.02
        assert plan.pools.bytes_for_sequences(1, plan.max_context) <= plan.budget.kv_bytes


def _notes(model: PlannedModel, options: Options) -> str:
    return " ".join(make_plan(model, options).notes)


def test_what_a_reader_must_know_is_noted() -> None:
    model = find_model("qwen2.5-0.5b")
    assert _notes(model, H200) == ""
    assert "beyond the model's own limit" in _notes(model, replace(H200, contexts=(100_000,)))
    assert "no multiple of 64" in _notes(model, replace(H200, max_num_batched_tokens=257))
    a100 = Options(find_device("A100-80"), dtype="fp8")
    assert "no 8-bit arithmetic" in _notes(model, a100)
    assert "KV is not divided" in _notes(find_model("gemma-3-4b"), replace(H200, tp=8))
    assert "counted as free" in _notes(find_model("llama-3.1-8b"), Options(find_device("L40S"), tp=2))


@pytest.mark.parametrize("name", ["qwen3-4b", "gemma-3-4b", "deepseek-v2-lite"])
def test_a_larger_share_or_a_longer_context_moves_sequences_the_right_way(name: str) -> None:
    model = find_model(name)
    more = [make_plan(model, replace(H200, share=s)).max_sequences for s in (0.5, 0.7, 0.9, 1.0)]
    assert more == sorted(more) and more[0] < more[-1]
    fewer = [make_plan(model, replace(H200, contexts=(c,))).max_sequences for c in (512, 4096, 32768)]
    assert fewer == sorted(fewer, reverse=True) and fewer[0] > fewer[-1]
