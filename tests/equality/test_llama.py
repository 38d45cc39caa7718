"""A tiny random Llama served every way we can, against transformers: greedy float32 tokens are equal.

Each cell also proves that what it is about did happen.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.equality.llama_rig import Cell, check_greedy, prompts, request, run, tiny_llama

LENS = (1, 15, 16, 17, 32, 47)

Model = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("llama")
    return folder, tiny_llama(folder, rope="llama3")


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("budget", [512, 20, 7], ids=lambda n: f"budget{n}")
@pytest.mark.parametrize("block_size", [4, 16])
def test_batched_and_chunked_prefill(model: Model, overlap: bool, budget: int, block_size: int) -> None:
    folder, oracle = model
    requests = [request(f"r{i}", p) for i, p in enumerate(prompts(LENS))]
    ran = run(folder, Cell(budget=budget, block_size=block_size, overlap=overlap), requests)
    check_greedy(oracle, ran)
    assert ran.max_rows_in_step > 1
    assert ran.simulation.max_in_flight == (2 if overlap else 1)
    if budget < 512:
        assert ran.scheduler.counters.prefill_chunks > len(requests) and ran.mixed_steps > 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("rope", ["default", "llama3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_request_alone(tmp_path: Path, backend: str, rope: str, tied: bool) -> None:
    oracle = tiny_llama(tmp_path, tied=tied, rope=rope, seed=3)
    requests = [request("alone", prompts((37,))[0], max_tokens=40)]
    check_greedy(oracle, run(tmp_path, Cell(backend=backend), requests))


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("budget", [512, 13], ids=lambda n: f"budget{n}")
def test_prefix_hits_partial_and_full(model: Model, overlap: bool, budget: int) -> None:
    folder, oracle = model
    first = [request("a", prompts((48,), shared=48)[0])]
    again = [request(f"b{i}", p) for i, p in enumerate(prompts((48, 49, 64, 40), shared=40))]
    full = [request("c", prompts((48,), shared=48)[0])]
    ran = run(folder, Cell(budget=budget, overlap=overlap), first, late=again + full)
    check_greedy(oracle, ran)
    assert ran.scheduler.counters.prefix_hits_tokens > 0
    assert full[0].cached_tokens == 32, "a full hit recomputes the last block's tokens, never none"


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
def test_preempted_and_resumed(model: Model, overlap: bool, caching: bool) -> None:
    folder, oracle = model
    requests = [request(f"r{i}", p, max_tokens=60) for i, p in enumerate(prompts((20, 33, 16, 31)))]
    cell = Cell(budget=64, block_size=4, num_blocks=44, overlap=overlap, caching=caching)
    ran = run(folder, cell, requests)
    check_greedy(oracle, ran)
    assert ran.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("prompt_len", [16, 21, 32])
def test_several_choices_of_one_prompt(model: Model, overlap: bool, prompt_len: int) -> None:
    folder, oracle = model
    prompt = prompts((prompt_len,))[0]
    parent = request("n", prompt)
    children = [request("n", prompt, index=i, fork_of=parent) for i in (1, 2)]
    ran = run(folder, Cell(overlap=overlap), [parent, *children])
    check_greedy(oracle, ran)
    assert ran.scheduler.counters.forks == 2
    assert (prompt_len - 1) % 16 == 0 or any(plan.copies for plan in ran.simulation.plans)


def test_sampled_tokens_do_not_depend_on_batch_chunks_preemption_or_overlap(model: Model) -> None:
    folder, _ = model
    sampling = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.3, "repetition_penalty": 1.1}

    def outputs(cell: Cell) -> tuple[dict[tuple[str, int], list[int]], int]:
        requests = [request(f"r{i}", p, 50, **sampling) for i, p in enumerate(prompts((20, 33, 16, 31)))]
        ran = run(folder, cell, requests)
        return ran.outputs, ran.scheduler.counters.preemptions

    plain, _ = outputs(Cell())
    assert len({tuple(ids) for ids in plain.values()}) == 4
    assert outputs(Cell(budget=11, overlap=True))[0] == plain
    assert outputs(Cell(max_rows=1))[0] == plain
    squeezed, preemptions = outputs(Cell(block_size=4, num_blocks=40))
    assert squeezed == plain and preemptions > 0


def test_logprobs_of_prompt_and_output_are_the_models(model: Model) -> None:
    folder, oracle = model
    prompt = prompts((45,))[0]
    req = request("r", prompt, max_tokens=5, prompt_logprobs=3, logprobs=2)
    ran = run(folder, Cell(budget=16), [req])
    tokens = prompt + ran.outputs[req.key]
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert ran.scheduler.counters.prefill_chunks > 1 and len(req.prompt_logprobs) == 44
    for at, found in enumerate(req.prompt_logprobs):
        assert found.logprob == pytest.approx(float(expected[at, tokens[at + 1]]), abs=1e-4)
        best = expected[at].topk(3)
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)
