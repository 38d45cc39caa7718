"""What a device's runner can do, done at once: guesses, an fp8 pool, bounds and swaps, over buckets and fixed buffers.

The judge is the plain runner with the same pool and bounds, without graphs, guesses or preemption.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.cache.manager import CacheManager
from steelyard.checkpoint.find import open_checkpoint
from steelyard.core.request import Request
from steelyard.core.step import RowWork, StepResult, Want
from steelyard.runner.options import RunnerOptions
from steelyard.runner.start import start_torch_runner
from steelyard.runner.start_device import start_device_runner
from steelyard.scheduler.options import Counters, SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.scheduler.speculation import Speculation
from steelyard.sim.clock import VirtualClock
from steelyard.sim.simulation import Simulation
from tests.equality.llama_rig import prompts, request, tiny_llama
from tests.runner.test_device_runner import enter, go, start

BOUNDS: dict[str, Any] = {"kv_window": 24, "kv_sinks": 5}
TIGHT_BLOCKS = {False: 26, True: 14}
LIKED = ((5, 60.0), (6, 60.0))
"""Biases under which every token is one of two, so that guesses come true."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    tiny_llama(folder)
    return folder


def requests() -> list[Request]:
    some = prompts((20, 33, 16, 31, 9))
    return [
        request("plain", some[0], 40),
        request("liked", some[1], 40, logit_bias=LIKED),
        request("drawn", some[2], 40, temperature=2.0, logit_bias=LIKED),
        request("cut", some[3], 40, temperature=1.0, top_k=3),
        request("judged", some[4], 40, logit_bias=LIKED, logprobs=2, prompt_logprobs=1),
    ]


def serve(runner: Any, guesses: int) -> tuple[dict[tuple[str, int], list[int]], Counters, list[StepResult]]:
    results: list[StepResult] = []
    collect = runner.collect

    def kept(step: Any) -> StepResult:
        results.append(collect(step))
        return results[-1]

    runner.collect = kept
    caps, speculation = runner.caps, Speculation(guesses, 40)
    options = SchedulerOptions(overlap=caps.overlaps, speculation=speculation)
    scheduler = Scheduler(caps, CacheManager(caps), options)
    simulation = Simulation(scheduler, runner, VirtualClock())
    for one in requests():
        simulation.add(one)
    while scheduler.has_work:
        assert simulation.step(), "stuck"
        scheduler.check()
    return simulation.outputs, scheduler.counters, results


def options_of(kv: str, is_bounded: bool, num_blocks: int, **options: Any) -> RunnerOptions:
    bounds = BOUNDS if is_bounded else {}
    return RunnerOptions(
        dtype="float32", device="cpu", backend="reference", max_num_seqs=6, max_num_batched_tokens=40, block_size=4,
        max_model_len=96, kv_cache_dtype=kv, num_gpu_blocks_override=num_blocks, **bounds, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("kv", "is_bounded"), [*product(["auto", "fp8"], [False, True])])
def test_guesses_swaps_bounds_and_an_fp8_pool_at_once_change_no_token(folder: Path, kv: str, is_bounded: bool) -> None:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(str(folder))
    expected, calm, _ = serve(start_torch_runner(checkpoint, options_of(kv, is_bounded, 200)), 0)
    assert calm.preemptions == calm.draft_tokens == 0
    for guesses in (0, 4):
        tight = options_of(kv, is_bounded, TIGHT_BLOCKS[is_bounded], swap_space_bytes=1 << 22, overlap=not guesses)
        found, counters, results = serve(start_device_runner(checkpoint, tight), guesses)
        assert found == expected
        assert counters.swaps_out == counters.swaps_in == counters.preemptions > 0
        assert {r.timing.graph.split(" ")[0] for r in results} == {"decode", "mixed"}
        assert bool(guesses) == (counters.draft_tokens > 0)
        if guesses:
            assert counters.draft_tokens > counters.accepted_tokens > 10
            assert max(len(row.ids) for r in results for row in r.rows) > 2


def told(runner: Any, guesses: int) -> tuple[dict[int, list[int]], int]:
    """Seven tokens of a greedy row and of a drawn one, which guess their own first tokens; and the most of a step."""
    first = enter(0, 1, tuple(range(40, 70)))
    second = enter(1, 7, (5, 6, 5, 6), temperature=2.0, logit_bias=LIKED)
    found = {row.row: list(row.ids) for row in go(runner, **{key: first[key] + second[key] for key in first}).rows}
    starts, most = {0: 29, 1: 3}, 1
    while min(map(len, found.values())) < 7:
        work = tuple(RowWork(r, starts[r] + len(found[r]), 1 + guesses, Want.TOKEN, guesses, 1) for r in found)
        result = go(runner, work=work, num_drafts=2 * guesses)
        assert not result.failed
        for row in result.rows:
            found[row.row] += row.ids
            most = max(most, len(row.ids))
    return {row: ids[:7] for row, ids in found.items()}, most


@pytest.mark.slow
@pytest.mark.parametrize("is_bounded", [False, True])
@pytest.mark.parametrize(("kv", "judge"), [("auto", "reference"), ("fp8", "triton")])
def test_guesses_through_triton_kernels_change_no_token(tmp_path: Path, kv: str, judge: str, is_bounded: bool) -> None:
    """In the interpreter where there is no GPU. More rows of logits are drawn from than the runner has rows.

    An fp8 pool is judged by the same kernels without guesses: the interpreter does not round to e4m3 as devices do.
    """
    tiny_llama(tmp_path, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    options: dict[str, Any] = {"max_num_seqs": 2, "kv_cache_dtype": kv, "max_model_len": 96, "enforce_eager": True}
    options |= {"kv_window": 18, "kv_sinks": 3} if is_bounded else {}
    expected, _ = told(start(tmp_path, backend=judge, **options), 0)
    found, most = told(start(tmp_path, backend="triton", **options), 3)
    assert found == expected and most > 1
