"""Guesses from a request's own text: found as a slow search finds them, and never seen in what comes out."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.core.sampling import SamplingParams
from steelyard.engine import build
from steelyard.errors import StartError
from steelyard.llm import LLM
from steelyard.runner.options import RunnerOptions
from steelyard.runner.start_device import start_device_runner
from steelyard.scheduler.speculation import NGRAM, PATIENCE, Guesser, NgramIndex
from tests import tiny_model
from tests.scheduler.scheduler_rig import (
    Rig,
    assert_idle,
    assert_same_as_solo,
    make_choices,
    make_request,
    run_checked,
)


def slow_find(tokens: list[int]) -> int | None:
    """The last place, before the end, where the last NGRAM tokens stood: position of what followed them."""
    found = [end for end in range(NGRAM, len(tokens)) if tokens[end - NGRAM : end] == tokens[-NGRAM:]]
    return max(found, default=None)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.lists(st.integers(1, 9), max_size=12))
def test_the_index_finds_what_a_slow_search_finds_while_tokens_grow(tokens: list[int], steps: list[int]) -> None:
    index, length = NgramIndex(), 1
    for step in (0, *steps):
        length = min(length + step, len(tokens))
        known = tokens[:length]
        assert index.find(known) == (slow_find(known) if length >= NGRAM else None)


def test_failing_guesses_grow_rare_and_come_back_when_they_are_right() -> None:
    guesser = Guesser()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    assert guesser.guess(tokens, 4) == (4, 3)
    for _ in range(20):
        guesser.learn(4, 0)
    assert [guesser.guess(tokens, 4)[0] for _ in range(2 * PATIENCE)].count(1) == 2
    for _ in range(20):
        guesser.learn(1, 1)
    assert guesser.guess(tokens, 4) == (4, 3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "rig",
    [
        Rig(drafts=3, vocab_size=2),
        Rig(drafts=5, vocab_size=3, windows=(None, 24)),
        Rig(drafts=4, vocab_size=2, num_blocks=14, block_size=8),
        Rig(drafts=2, vocab_size=2, block_size=2, num_blocks=400, budget=40),
    ],
    ids=["plain", "window", "little room", "small blocks"],
)
def test_what_comes_out_is_what_comes_out_without_guesses(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    simulation = rig.simulation()
    requests = [
        make_request(str(i), [rng.randrange(rig.vocab_size) for _ in range(rng.randint(1, 40))], rng.randint(1, 50))
        for i in range(5)
    ]
    requests += make_choices("n", [1, 0] * 9, 20, 3)
    for request in requests:
        request.stop_ids = frozenset([0]) if rng.random() < 0.2 else frozenset()
        simulation.add(request)
    run_checked(simulation)
    counters = simulation.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.draft_tokens
    assert sum(r.num_drafted for r in requests) == counters.draft_tokens
    assert counters.preemptions > 0 or rig.num_blocks != 14
    assert_same_as_solo(simulation, requests, rig)
    assert_idle(simulation, requests)


@pytest.mark.parametrize("seed", range(4))
def test_every_position_computed_is_accounted_for(seed: int) -> None:
    rig = Rig(drafts=3, vocab_size=2, num_blocks=14, block_size=8)
    rng = random.Random(seed)
    simulation = rig.simulation()
    requests = [make_request(str(i), [rng.randrange(2) for _ in range(rng.randint(1, 30))], 40) for i in range(5)]
    for request in requests:
        request.stop_ids = frozenset([1]) if request.id == "2" else frozenset()
        request.sampling = SamplingParams(max_tokens=40, min_tokens=20 if request.id == "2" else 0, seed=3)
        simulation.add(request)
    run_checked(simulation)
    books = simulation.books
    for request in requests:
        [account] = books.accounts.of(request.id)  # type: ignore[union-attr, attr-defined]
        t = account.tokens()
        assert t["lost"] == request.num_drafted - request.num_accepted
        come_by = t["cached"] + t["shared"]
        parts = t["prompt"] - come_by + t["generated"] - 1 + t["recomputed"] + t["overshoot"] + t["lost"]
        assert t["computed"] == parts, t


def test_rows_beyond_the_load_are_not_guessed_for() -> None:
    for num_requests, guesses in ((4, False), (3, False), (2, True), (1, True)):
        simulation = Rig(drafts=3, draft_load=4, vocab_size=2).simulation()
        for i in range(num_requests):
            simulation.add(make_request(str(i), [0, 1] * 8, 60))
        run_checked(simulation)
        together = [p for p in simulation.plans if sum(w.num_new <= 4 for w in p.work) == num_requests]
        assert any(p.num_drafts for p in together) == guesses, num_requests
        assert all(p.num_tokens <= 4 for p in simulation.plans if p.num_drafts)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_model_says_the_same_with_and_without_guesses(tmp_path: Path, temperature: float) -> None:
    model = tiny_model.write(tmp_path / "tiny")
    two_tokens = ((5, 60.0), (6, 60.0))
    sampling = SamplingParams(
        temperature=temperature, seed=5, max_tokens=120, ignore_eos=True, logprobs=2, logit_bias=two_tokens
    )
    prompts = [[7, 8, 9, 10, 11] * 6, [3, 4, 5] * 4]
    options = {"dtype": "float32", "max_num_seqs": 4}
    plain = LLM(str(model), **options).generate(prompts, sampling)
    guessing = LLM(str(model), num_speculative_tokens=4, speculative_load=10, **options)
    found = guessing.generate(prompts, sampling)
    counters = guessing.engine.scheduler.counters
    assert counters.draft_tokens > counters.accepted_tokens > 10
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].logprobs is not None and theirs.outputs[0].logprobs is not None
        for a, b in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_fixed_buffers_say_the_same_with_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device runner, its graphs replayed as calls."""
    model = tiny_model.write(tmp_path / "tiny")
    sampling = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True, logit_bias=((5, 60.0), (6, 60.0)))
    prompts = [[7, 8, 9, 10, 11] * 6, [3, 4, 5] * 4]
    options = {"dtype": "float32", "max_num_seqs": 4, "device": "cpu", "block_size": 16, "num_gpu_blocks_override": 99}
    plain = LLM(str(model), **options).generate(prompts, sampling)

    def start(checkpoint: Any, given: RunnerOptions) -> Any:
        return start_device_runner(checkpoint, replace(given, backend="reference"))

    monkeypatch.setattr(build, "start_runner", start)
    llm = LLM(str(model), num_speculative_tokens=4, speculative_load=10, **options)
    found = llm.generate(prompts, sampling)
    assert llm.engine.scheduler.counters.accepted_tokens > 10
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain]


def test_penalties_and_grammars_are_not_guessed_for(tmp_path: Path) -> None:
    llm = LLM(str(tiny_model.write(tmp_path / "tiny")), num_speculative_tokens=4, speculative_load=10)
    llm.generate([[7, 8, 9] * 6], SamplingParams(temperature=0.0, max_tokens=60, repetition_penalty=1.1))
    assert llm.engine.scheduler.counters.draft_tokens == 0


@pytest.mark.parametrize("changes", [{"async_scheduling": True}, {"kv_cache": "off"}, {"script": "a.json"}])
def test_guesses_that_cannot_be_checked_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(StartError, match="--num-speculative-tokens"):
        LLM(str(tiny_model.write(tmp_path / "tiny")), num_speculative_tokens=4, **changes)
