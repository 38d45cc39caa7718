"""--kv-window through scheduler, cache and runner: the tokens of a float64 twin that masks, and few live blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from steelyard.cache.manager import CacheManager
from steelyard.checkpoint.find import open_checkpoint
from steelyard.core.request import Request
from steelyard.core.step import KvGroup
from steelyard.errors import StartError
from steelyard.plan.memory import blocks_per_sequence
from steelyard.runner import start_device
from steelyard.runner.options import RunnerOptions
from steelyard.runner.start import start_runner
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.clock import VirtualClock
from steelyard.sim.simulation import Simulation
from tests.equality.llama_rig import TIE, prompts, request, tiny_llama
from tests.scheduler.scheduler_rig import Rig, make_request

WINDOW, SINKS, BLOCK = 24, 5, 8
Model = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("bounded")
    return folder, tiny_llama(folder).double()


@dataclass
class Ran:
    """What served, and the most blocks that were ever active."""

    scheduler: Scheduler
    simulation: Simulation
    most_active: int = 0


def serve(folder: Path, requests: list[Request], late: list[Request], fixed: bool = False, **options: Any) -> Ran:
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 512, "block_size": BLOCK,
        "num_gpu_blocks_override": 96, "kv_window": WINDOW, "kv_sinks": SINKS,
    }  # fmt: skip
    given = RunnerOptions(**(sizes | options))
    checkpoint = open_checkpoint(str(folder))
    if fixed:
        runner: Any = start_device.start_device_runner(checkpoint, replace(given, backend="reference"))
    else:
        runner = start_runner(checkpoint, given)
    scheduler = Scheduler(runner.caps, CacheManager(runner.caps), SchedulerOptions(overlap=runner.caps.overlaps))
    ran = Ran(scheduler, Simulation(scheduler, runner, VirtualClock()))
    for wave in (requests, late):
        for one in wave:
            ran.simulation.add(one)
        while scheduler.has_work:
            assert ran.simulation.step(), "stuck"
            scheduler.check()
            ran.most_active = max(ran.most_active, scheduler.cache.usage().active)
    return ran


def check_greedy(twin: PreTrainedModel, ran: Ran, one: Request, tie: float = TIE) -> list[int]:
    """Every generated token is the twin's best, or within `tie` of it: float64 scores, and a mask by position.

    Returns prompt and output.
    """
    output = ran.simulation.outputs[one.key]
    ids = torch.tensor([one.tokens[: one.prompt_len] + output])
    at = torch.arange(ids.shape[1])
    seen = (at[None] <= at[:, None]) & ((at[:, None] - at[None] < WINDOW) | (at[None] < SINKS))
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    with torch.inference_mode():
        logits = twin(ids, attention_mask=mask[None, None]).logits[0, one.prompt_len - 1 : -1]
    assert output
    for at_output, (row, token) in enumerate(zip(logits, output)):
        assert row.max() - row[token] < tie, f"{one.key}: token {at_output}"
    return ids[0].tolist()


@pytest.mark.parametrize("fixed", [False, True], ids=["torch", "device"])
@pytest.mark.parametrize("budget", [512, 13], ids=["whole", "chunked"])
def test_tokens_are_those_of_a_twin_that_masks_in_chunks_and_after_hits(model: Model, budget: int, fixed: bool) -> None:
    folder, twin = model
    first = [request(f"r{i}", p, max_tokens=30) for i, p in enumerate(prompts((3, 20, 70, 150)))]
    again = [request("h", [*first[3].tokens[:144], 7, 8, 9], max_tokens=20)]
    ran = serve(folder, first, again, fixed, max_num_batched_tokens=budget)
    for one in (*first, *again):
        check_greedy(twin, ran, one)
    assert ran.scheduler.counters.prefix_hits_tokens >= 128


def test_a_long_request_holds_few_blocks_and_one_longer_than_the_pool_is_served(model: Model) -> None:
    folder, twin = model
    long = request("long", prompts((100,))[0], max_tokens=140)
    ran = serve(folder, [long], [], num_gpu_blocks_override=7, max_num_batched_tokens=8)
    assert len(check_greedy(twin, ran, long)) == 240 > 7 * BLOCK
    bound = blocks_per_sequence((KvGroup(3, WINDOW, SINKS),), BLOCK, 240)[0]
    assert bound == 1 + 4 and ran.most_active <= bound + 1  # and the block of a chunk that is being written


@pytest.mark.parametrize(("chunk", "most"), [(8, 5), (13, 7), (64, 12), (512, 31)])
def test_a_chunk_of_the_prompt_holds_its_own_blocks_beside_the_window(model: Model, chunk: int, most: int) -> None:
    folder, _ = model
    ran = serve(folder, [request("long", prompts((241,))[0], max_tokens=5)], [], max_num_batched_tokens=chunk)
    held = ran.scheduler.cache.most_active()
    whole, kept = -(-241 // BLOCK), -(-SINKS // BLOCK)
    assert held == most <= min(whole, kept + -(-(WINDOW + chunk - 2) // BLOCK) + 1)


@pytest.mark.parametrize(("prompt_len", "most"), [(241, 16), (1801, 37)])
def test_the_guides_figures_of_a_bounded_prompt(prompt_len: int, most: int) -> None:
    simulation = Rig(num_blocks=64, budget=512, windows=((64, 4),)).simulation()
    simulation.add(make_request("long", list(range(prompt_len)), max_tokens=2))
    simulation.run()
    assert simulation.scheduler.cache.most_active() == most
    assert blocks_per_sequence((KvGroup(3, 64, 4),), 16, 4096) == (6,)


def test_keys_of_blocks_name_the_bounds_and_the_start_says_what_is_forgotten(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = open_checkpoint(str(model[0]))
    layouts = set()
    for bounds in ({}, {"kv_window": 24}, {"kv_window": 24, "kv_sinks": 0}, {"kv_window": 25}):
        options = RunnerOptions(device="cpu", dtype="float32", num_gpu_blocks_override=8, **bounds)
        layouts.add(start_runner(checkpoint, options).caps.kv_layout)
    assert len(layouts) == 4 and "float32/float32/window 24 after 4/16" in layouts
    assert "the latest 24 tokens and the first 4" in caplog.text and "forgotten" in caplog.text


def test_a_model_with_windows_of_its_own_is_refused(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=16, max_position_embeddings=64,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    options = RunnerOptions(device="cpu", kv_window=8)
    with pytest.raises(StartError, match=r"--kv-window.*windows of its own"):
        start_runner(open_checkpoint(str(tmp_path)), options)


def test_sampled_rows_and_forks_work_over_kept_blocks(model: Model) -> None:
    folder, twin = model
    parent = request("f", prompts((61,))[0], max_tokens=20)
    forks = [request("f", parent.tokens, index=i, fork_of=parent, max_tokens=20) for i in (1, 2)]
    ran = serve(folder, [parent, *forks], [])
    assert ran.scheduler.counters.forks == 2
    for one in (parent, *forks):
        check_greedy(twin, ran, one)
