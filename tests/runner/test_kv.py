"""How large the pools are made: what the rows can use, never too little for one of them, and the reason if refused."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.cache.manager import CacheManager
from steelyard.core.step import RunnerCaps
from steelyard.errors import StartError
from steelyard.plan.memory import GIB, MemoryBudget
from steelyard.plan.presets import preset_config
from steelyard.plan.shape import ModelShape
from steelyard.runner.kv import size_pool
from steelyard.runner.options import Limits, RunnerOptions

GEMMA = ModelShape.from_config(preset_config("gemma-3-4b"))
LLAMA = ModelShape.from_config(preset_config("llama-3.1-8b"))
CONTEXT, BLOCK = 8192, 16


def sized(shape: ModelShape, rows: int, kv_bytes: int = 1000 * GIB, **options: Any) -> tuple[int, ...]:
    limits = Limits(CONTEXT, rows, CONTEXT, BLOCK, overlaps=False)
    budget = MemoryBudget(total_bytes=kv_bytes, share=1.0, weights_bytes=0)
    return size_pool(shape, RunnerOptions(**options), limits, budget, 2)


def capacity(shape: ModelShape, num_blocks: tuple[int, ...], at_once: bool) -> int:
    groups = shape.kv_groups()
    caps = RunnerCaps(BLOCK, num_blocks, groups, 1, CONTEXT, CONTEXT, 100, False, "f", "l")
    return CacheManager(caps).capacity_tokens(at_once=at_once)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 17, 18, 64, 1024])
def test_a_pool_for_few_rows_of_short_windows_starts_and_holds_a_whole_context(window: int, rows: int) -> None:
    bounded = LLAMA.bounded(window, 4)
    num_blocks = sized(bounded, rows)
    assert num_blocks == (rows * (1 + -(-(window - 1) // BLOCK) + 1),)
    assert capacity(bounded, num_blocks, at_once=False) == CONTEXT


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("shape", [GEMMA, LLAMA, LLAMA.bounded(64, 4)], ids=["windows", "full", "bounded"])
@pytest.mark.parametrize("options", [{"whole_prompts": True}, {"kv_allocation": "contiguous"}], ids=["whole", "runs"])
def test_where_blocks_are_taken_at_once_a_whole_context_fits(
    shape: ModelShape, rows: int, options: dict[str, Any]
) -> None:
    num_blocks = sized(shape, rows, **options)
    assert capacity(shape, num_blocks, at_once=True) == CONTEXT
    if "kv_allocation" in options:
        assert num_blocks == (rows * CONTEXT // BLOCK,) * len(num_blocks)


def test_with_less_memory_whole_prompts_still_get_what_the_full_layers_hold() -> None:
    plain, whole = sized(GEMMA, 64, GIB), sized(GEMMA, 64, GIB, whole_prompts=True)
    windowed = next(i for i, group in enumerate(GEMMA.kv_groups()) if group.window is not None)
    assert plain[windowed] < plain[1 - windowed] and whole[windowed] == whole[1 - windowed] < plain[1 - windowed]
    assert sized(LLAMA, 64, GIB, whole_prompts=True) == sized(LLAMA, 64, GIB)


def test_too_little_memory_is_said_as_that_and_nothing_else_is() -> None:
    with pytest.raises(StartError, match=r"^1,048,576 bytes are left .* are 0 tokens; the least to serve with is 128"):
        sized(LLAMA, 64, 2**20)
    with pytest.raises(StartError, match=r"are 32 tokens; the least to serve with is 48, in"):
        sized(LLAMA.bounded(17, 4), 1, 3 * BLOCK * LLAMA.kv_bytes_per_token())
