"""Requests swapped to the host and back on a tiny random model: the tokens of no preemption, and of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from steelyard.core.request import Request
from tests.equality.llama_rig import VOCAB, Cell, Ran, check_greedy, prompts, request, run, tiny_llama

Model = tuple[Path, PreTrainedModel]
SPACE = 1 << 22
TIGHT = Cell(block_size=4, num_blocks=36, max_model_len=96, swap_space_bytes=SPACE)
ROOMY = Cell(block_size=4, num_blocks=400, max_model_len=96)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("swap")
    return folder, tiny_llama(folder)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Layers of two KV groups, one of them with a window."""
    folder = tmp_path_factory.mktemp("swap-window")
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=20, sliding_window_pattern=2,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None, query_pre_attn_scalar=16,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return folder, model


def requests() -> list[Request]:
    return [request(f"r{i}", p, max_tokens=36) for i, p in enumerate(prompts((20, 33, 16, 31)))]


def assert_swapped(ran: Ran, cell: Cell) -> None:
    counters, host = ran.scheduler.counters, ran.scheduler.cache.host
    assert counters.swaps_out == counters.swaps_in == counters.preemptions > 0 and counters.recomputed_tokens == 0
    assert host.num_out > 0 and host.num_in > 0
    assert ran.simulation.max_in_flight == (2 if cell.overlap else 1)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[tuple[str, int], list[int]]]:
    """By model, what comes out where nobody is preempted; found once."""
    return {}


@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize(("budget", "overlap"), [(512, True), (13, False), (13, True)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_swapped_and_resumed(
    name: str,
    budget: int,
    caching: bool,
    overlap: bool,
    undisturbed: dict[str, dict[tuple[str, int], list[int]]],
    request_fixture: pytest.FixtureRequest,
) -> None:
    folder, oracle = request_fixture.getfixturevalue(name)
    cell = replace(TIGHT, budget=budget, caching=caching, overlap=overlap)
    ran = run(folder, cell, requests())
    assert_swapped(ran, cell)
    check_greedy(oracle, ran)
    if name not in undisturbed:
        calm = run(folder, ROOMY, requests())
        assert calm.scheduler.counters.preemptions == 0
        undisturbed[name] = calm.outputs
    assert ran.outputs == undisturbed[name]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_choices_of_one_prompt_that_are_swapped(llama: Model, overlap: bool) -> None:
    folder, oracle = llama
    prompt = prompts((21,))[0]
    parent = request("n", prompt, 60)
    forks = [parent, *(request("n", prompt, 60, index=i, fork_of=parent) for i in (1, 2))]
    cell = replace(TIGHT, overlap=overlap, caching=False)
    ran = run(folder, cell, forks)
    assert_swapped(ran, cell)
    assert ran.scheduler.counters.forks == 2
    check_greedy(oracle, ran)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_prefix_that_was_evicted_is_copied_back(
    name: str, overlap: bool, request_fixture: pytest.FixtureRequest
) -> None:
    folder, oracle = request_fixture.getfixturevalue(name)
    first = [request(f"a{i}", p, 8) for i, p in enumerate(prompts((60, 61, 62, 63)))]
    again = [request(f"b{i}", p, 8) for i, p in enumerate(prompts((60, 61, 62, 63)))]
    ran = run(folder, replace(TIGHT, overlap=overlap), first, again)
    check_greedy(oracle, ran)
    assert ran.scheduler.counters.host_hits_tokens > 0 and ran.scheduler.cache.host.num_in > 0
    assert [ran.outputs[r.key] for r in again] == [ran.outputs[r.key] for r in first]


@pytest.fixture
def request_fixture(request: pytest.FixtureRequest) -> pytest.FixtureRequest:
    """pytest's own `request`, whose name is taken here."""
    return request
