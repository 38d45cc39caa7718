"""Vectors of a tiny random Llama against transformers' final hidden states, in float32, however they were computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from steelyard.core.request import FinishReason, Request
from steelyard.core.step import Want
from tests.equality.llama_rig import Cell, Ran, prompts, request, run, tiny_llama
from tests.runner.test_device_runner import serve

LENS = (1, 15, 16, 17, 32, 47)
KINDS = (Want.POOL_LAST, Want.POOL_MEAN)
Model = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("pooled")
    return folder, tiny_llama(folder)


def pooled(name: str, prompt: list[int], kind: Want) -> Request:
    made = request(name, prompt, max_tokens=None)  # type: ignore[arg-type]
    made.pooling = kind
    return made


@torch.inference_mode()
def check(oracle: PreTrainedModel, requests: list[Request], tolerance: float = 1e-4) -> None:
    for made in requests:
        hidden = oracle(torch.tensor([made.tokens]), output_hidden_states=True).hidden_states[-1][0]
        wanted = hidden.mean(dim=0) if made.pooling is Want.POOL_MEAN else hidden[-1]
        torch.testing.assert_close(torch.tensor(made.vector()), wanted, rtol=tolerance, atol=tolerance / 10)
        assert made.reason is FinishReason.STOP and made.num_generated == 0


def mixed(shared: int = 0) -> list[Request]:
    """Both kinds of every length, and requests that make tokens beside them."""
    found = [pooled(f"{kind.name}{i}", p, kind) for kind in KINDS for i, p in enumerate(prompts(LENS, shared))]
    return found[:6] + [request("text", prompts((20,))[0], 12)] + found[6:]


def vectors_of(requests: list[Request]) -> list[Request]:
    return [r for r in requests if r.pooling]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("budget", [512, 20, 7], ids=lambda n: f"budget{n}")
def test_whole_and_chunked_among_requests_that_make_tokens(model: Model, budget: int, overlap: bool) -> None:
    folder, oracle = model
    ran = run(folder, Cell(budget=budget, overlap=overlap), mixed())
    check(oracle, vectors_of(ran.requests))
    assert len(ran.outputs[("text", 0)]) == 12
    if budget < 512:
        assert ran.scheduler.counters.prefill_chunks > len(ran.requests)


def test_a_prefix_hit_serves_the_last_and_never_the_mean(model: Model) -> None:
    folder, oracle = model
    [prompt] = prompts((48,))
    late = [pooled(kind.name or "", prompt, kind) for kind in KINDS]
    check(oracle, vectors_of(run(folder, Cell(), [request("first", prompt)], late).requests))
    assert [r.cached_tokens for r in late] == [32, 0]


def test_preempted_in_the_middle_of_their_prompts(model: Model) -> None:
    folder, oracle = model
    texts = [request(f"t{i}", p, 60) for i, p in enumerate(prompts((20, 24)))]
    late = [pooled(f"{kind.name}{i}", p, kind) for kind in KINDS[::-1] for i, p in enumerate(prompts((70, 75), seed=9))]
    ran = run(folder, Cell(budget=4, num_blocks=11, caching=False, max_rows=4), [*texts, *late])
    check(oracle, vectors_of(ran.requests))
    assert ran.scheduler.counters.preemptions > 0
    assert sum(r.num_preemptions for r in late if r.pooling is Want.POOL_MEAN) > 0


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_the_device_runner_gives_the_same(model: Model, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    folder, oracle = model
    ran: Ran
    ran, results = serve(monkeypatch, folder, Cell(20, overlap=True), mixed(), **options)
    check(oracle, vectors_of(ran.requests))
    assert sum(len(result.pooled) for result in results) > len(LENS) * 2
