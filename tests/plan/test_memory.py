"""What fits, and its exact inverse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.step import KvGroup
from steelyard.errors import StartError
from steelyard.plan.memory import (
    GIB,
    KvPools,
    MemoryBudget,
    activation_peak_bytes,
    blocks_per_sequence,
    kv_block_bytes,
)
from steelyard.plan.presets import preset_config
from steelyard.plan.shape import ModelShape

NAMES = ("llama-3.1-8b", "qwen3-0.6b", "gemma-3-4b", "gpt-oss-20b", "deepseek-v2-lite", "gemma-2-2b")
SHAPES = {n: ModelShape.from_config(preset_config(n)) for n in NAMES}
shapes = st.sampled_from(list(SHAPES.values()))
block_sizes = st.sampled_from([1, 8, 16, 64, 256])


def test_a_block_holds_all_layers_of_its_group() -> None:
    model = SHAPES["llama-3.1-8b"]
    assert kv_block_bytes(model, 16) == 16 * 131_072
    assert kv_block_bytes(model, 16, 1) == 8 * 131_072
    assert kv_block_bytes(model, 16, tp=4) == 4 * 131_072
    windowed = SHAPES["gemma-3-4b"]
    both = [kv_block_bytes(windowed, 16, group=g) for g in (0, 1)]
    assert both == [16 * 29 * 4096, 16 * 5 * 4096]
    assert sum(both) == 16 * windowed.kv_bytes_per_token()


def test_sixteen_requests_of_8192_tokens_take_18_gib() -> None:
    model = ModelShape.from_config(preset_config("qwen3-4b"))
    pools = KvPools.of(model, 16)
    null_block = 16 * 147_456
    assert pools.bytes_for_sequences(16, 8192) == 18 * GIB + null_block
    assert pools.sequences_in(18 * GIB + null_block, 8192) == 16
    assert pools.sequences_in(18 * GIB + null_block - 1, 8192) == 15


@given(shapes, block_sizes, st.integers(0, 50_000), st.sampled_from([512, 4096, 100_000]))
def test_fit_is_the_exact_inverse_of_bytes(model: ModelShape, block_size: int, scale: int, expected: int) -> None:
    pools = KvPools.of(model, block_size, 2, expected_len=expected)
    size = pools.bytes_at(scale)
    assert pools.fit(size) == scale
    assert pools.fit(pools.bytes_at(scale + 1) - 1) == scale


@given(shapes, block_sizes, st.integers(0, 9000), st.sampled_from([512, 4096, 100_000]))
def test_pools_with_a_least_grow_together_until_each_has_it(
    model: ModelShape, block_size: int, scale: int, expected: int
) -> None:
    plain = KvPools.of(model, block_size, 2, expected_len=expected)
    least = tuple(3000 for _ in plain.ratio)
    pools = replace(plain, least=least)
    assert pools.fit(pools.bytes_at(scale)) == scale == pools.fit(pools.bytes_at(scale + 1) - 1)
    shares = plain.blocks_at(scale)
    assert pools.blocks_at(scale) == tuple(max(n, min(scale, 3000)) for n in shares)


@given(shapes, block_sizes, st.integers(0, 80 * GIB), st.integers(0, GIB))
def test_more_memory_never_fits_less(model: ModelShape, block_size: int, budget: int, more: int) -> None:
    pools = KvPools.of(model, block_size)
    small, large = pools.fit(budget), pools.fit(budget + more)
    assert small <= large
    assert all(a <= b for a, b in zip(pools.blocks_at(small), pools.blocks_at(large)))
    for length in (1, 500, 4096):
        assert pools.sequences_in(budget, length) <= pools.sequences_in(budget + more, length)


@given(shapes, block_sizes, st.integers(1, 64), st.integers(1, 20_000))
def test_sequences_and_bytes_are_inverse(model: ModelShape, block_size: int, count: int, length: int) -> None:
    pools = KvPools.of(model, block_size)
    size = pools.bytes_for_sequences(count, length)
    assert pools.sequences_in(size, length) == count
    assert pools.sequences_in(size - 1, length) == count - 1
    assert size >= count * model.kv_bytes_per_sequence(length) + sum(pools.block_bytes)


@given(shapes, block_sizes, st.integers(0, 4 * GIB))
@settings(max_examples=50)
def test_the_longest_sequence_in_a_budget_is_the_inverse_of_its_bytes(
    model: ModelShape, block_size: int, budget: int
) -> None:
    pools = KvPools.of(model, block_size)
    longest = pools.longest_in(budget)
    assert longest == 0 or pools.bytes_for_sequences(1, longest) <= budget
    assert pools.bytes_for_sequences(1, longest + 1) > budget


@given(st.integers(1, 400), st.integers(1, 64), st.integers(1, 2000))
@settings(max_examples=200)
def test_a_window_never_spans_more_blocks_than_counted(window: int, block_size: int, context_len: int) -> None:
    counted = blocks_per_sequence((KvGroup(1, window),), block_size, context_len)[0]
    spans = set()
    for position in range(max(context_len - 3 * block_size, 0), context_len):
        first = max(position - window + 1, 0) // block_size
        spans.add(position // block_size - first + 1)
    assert max(spans) <= counted
    if context_len > window + 3 * block_size and window > 1:
        assert max(spans) == counted or block_size == 1


@given(st.integers(GIB, 200 * GIB), st.floats(0.1, 1.0), st.integers(0, 50 * GIB), st.integers(0, GIB))
def test_terms_sum_to_the_total(total: int, share: float, weights: int, other: int) -> None:
    budget = MemoryBudget(total, share, weights, other, other // 2, other // 3, other // 4)
    assert sum(budget.terms().values()) == total


def test_a_model_that_does_not_fit_is_refused_with_every_term() -> None:
    budget = MemoryBudget(24 * GIB, 0.9, 140 * GIB, GIB, GIB, 0, 0)
    with pytest.raises(StartError, match=r"weights 140\.00.*tensor-parallel"):
        budget.check()


def test_a_worked_example_of_another_planner_llama_8b_on_an_l4() -> None:
    """22.49 GiB at a share of 0.92 with 14.96 GiB of weights and 0.83 of runtime: 4.91 GiB of KV, 40,208 tokens."""
    model = SHAPES["llama-3.1-8b"]
    assert round(model.weight_bytes() / GIB, 2) == 14.96
    budget = MemoryBudget(int(22.49 * GIB), 0.92, model.weight_bytes(), context_bytes=int(0.83 * GIB))
    assert round(budget.kv_bytes / GIB, 1) == 4.9
    tokens = 16 * KvPools.of(model, 16).fit(budget.kv_bytes)
    assert abs(tokens - 40_208) < 300


def test_activation_peak_grows_with_tokens_and_rows() -> None:
    model = SHAPES["llama-3.1-8b"]
    assert activation_peak_bytes(model, 8192, 256) > activation_peak_bytes(model, 2048, 256)
    assert activation_peak_bytes(model, 256, 256) >= 256 * model.vocab_size * 4
    assert activation_peak_bytes(model, 8192, 1, tp=8) < activation_peak_bytes(model, 8192, 1)
