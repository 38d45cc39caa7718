"""Section K: paged KV, the prefix cache, preemption. Block-multiple prompts, full hits and preempt-then-hit first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cases.rig import CANARY, Answer, Server, same_as_solo

Prompts = Callable[[int], list[int]]
Solo = Callable[..., Answer]
PREEMPTIONS = "vllm:num_preemptions_total"
HITS = "vllm:prefix_cache_hits_total"


@pytest.mark.parametrize("length", [15, 16, 17, 32, 48, 64])
def test_k01_a_fully_cached_prompt_computes_its_last_token_again(
    server: Server, prompts: Prompts, solo: Solo, length: int
) -> None:
    prompt = prompts(length)
    alone = solo(prompt, max_tokens=20)
    full = length // 16 * 16
    # A prompt that ends with a block still computes its last token: of that block nothing is read.
    readable = full - 16 if full == length else full
    first = server.complete(prompt, max_tokens=20)
    second = server.complete(prompt, max_tokens=20)
    assert first.cached_tokens == 0
    assert readable <= second.cached_tokens <= length - 1
    at_once = server.together([{"prompt": prompt, "max_tokens": 20}] * 2)
    twins = prompts(length)
    cold = server.together([{"prompt": twins, "max_tokens": 20}] * 2)
    for answer in (first, second, *at_once):
        same_as_solo(answer, alone)
    for answer in cold:
        same_as_solo(answer, solo(twins, max_tokens=20))


@pytest.mark.on("tight")
def test_preempted_then_hit_is_the_same_as_solo(server: Server, prompts: Prompts, solo: Solo) -> None:
    """Requests lose their blocks, come back over what the cache kept of them, and are then asked again."""
    before = server.settled()
    shared = prompts(32)
    asked = [shared + prompts(8 + i) for i in range(6)]
    bodies = [{"prompt": prompt, "max_tokens": 70} for prompt in asked]
    answers = server.together(bodies) + [server.complete(**body) for body in bodies[:3]]
    assert server.grown(before, PREEMPTIONS) > 0
    assert server.grown(before, "steelyard:recomputed_tokens_total") > 0
    assert server.grown(before, HITS) > 0
    for prompt, answer in zip(asked + asked[:3], answers):
        same_as_solo(answer, solo(prompt, max_tokens=70))


@pytest.mark.on("chunked")
def test_k03_two_equal_prompts_in_one_step(server: Server, prompts: Prompts, solo: Solo) -> None:
    for length in (64, 65):
        prompt = prompts(length)
        for answer in server.together([{"prompt": prompt, "max_tokens": 12}] * 2):
            same_as_solo(answer, solo(prompt, max_tokens=12))


@pytest.mark.on("tight")
def test_k07_what_a_preemption_computes_again_is_no_prefix_hit(server: Server, prompts: Prompts) -> None:
    before = server.settled()
    answers = server.together([{"prompt": prompts(40), "max_tokens": 60} for _ in range(10)])
    assert server.grown(before, PREEMPTIONS) > 0
    assert server.grown(before, "steelyard:recomputed_tokens_total") > 0
    assert server.grown(before, HITS) == 0
    assert [answer.cached_tokens for answer in answers] == [0] * 10


def test_k09_echo_with_logprobs_of_a_cached_prompt(server: Server, prompts: Prompts) -> None:
    body: dict[str, Any] = {"prompt": prompts(40), "max_tokens": 4, "echo": True, "logprobs": 1}
    first, second = (server.completions(**body)["choices"][0] for _ in range(2))
    assert first["text"] == second["text"]
    for choice in (first, second):
        values = choice["logprobs"]["token_logprobs"]
        assert len(values) == 44
        assert values[0] is None
        assert all(value <= 0 for value in values[1:])
    assert _close(first, second)


def test_k11_prompt_logprobs_belong_to_who_asked(server: Server, prompts: Prompts) -> None:
    asked = [prompts(20 + 5 * i) for i in range(8)]

    def body(i: int) -> dict[str, Any]:
        extra = {"echo": True, "logprobs": 1} if i % 2 else {}
        return {"prompt": asked[i], "max_tokens": 4, **extra}

    alone = [server.completions(**body(i))["choices"][0] for i in range(8)]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: server.completions(**body(i))["choices"][0], range(8)))
    for i, (one, other) in enumerate(zip(alone, together)):
        assert one["text"] == other["text"]
        if i % 2:
            assert len(one["logprobs"]["tokens"]) == len(asked[i]) + 4
            assert _close(one, other)
        else:
            assert one["logprobs"] is None
            assert other["logprobs"] is None


def _close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    a, b = (choice["logprobs"]["token_logprobs"] for choice in (one, other))
    return len(a) == len(b) and all(x == y or abs(x - y) < 1e-3 for x, y in zip(a, b))


def test_k19_a_mixed_batch_of_sampling_settings(server: Server, prompts: Prompts, solo: Solo) -> None:
    prompt = prompts(24)
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_p": 0.9, "seed": 1},
        {"temperature": 0.7, "top_k": 5, "seed": 2},
        {"temperature": 1.5, "top_k": 1, "seed": 3},
        {"temperature": 1.0, "min_p": 0.2, "seed": 4, "logit_bias": {"7": 5}},
        {},
    ]
    answers = server.together([{"prompt": prompt, "max_tokens": 20, **extra} for extra in settings])
    alone = solo(prompt, max_tokens=20)
    for i in (0, 3, 5):
        same_as_solo(answers[i], alone)
    again = server.together([{"prompt": prompt, "max_tokens": 20, **extra} for extra in settings])
    assert [a.ids for a in again] == [a.ids for a in answers]
    assert len({tuple(a.ids) for a in answers}) > 2


def test_k21_no_generation_is_cut_short_under_load(server: Server, prompts: Prompts) -> None:
    answers = server.together([{"prompt": prompts(12), "max_tokens": 50} for _ in range(64)])
    assert [(len(a.ids), a.finish_reason) for a in answers] == [(50, "length")] * 64


def test_k23_a_hit_answers_as_a_miss_does(server: Server, prompts: Prompts, solo: Solo) -> None:
    prompt = prompts(100)
    answers = [server.complete(prompt, max_tokens=20) for _ in range(4)]
    assert [a.ids for a in answers] == [answers[0].ids] * 4
    same_as_solo(answers[0], solo(prompt, max_tokens=20))
    assert answers[0].cached_tokens == 0
    assert [a.cached_tokens for a in answers[1:]] == [96] * 3


@pytest.mark.slow
def test_k27_a_restart_answers_the_same(start: Callable[..., Server], servers: Callable[[str], Server]) -> None:
    canary = servers("plain").complete(CANARY, max_tokens=40).ids
    for _ in range(2):
        server = start("--num-gpu-blocks-override", "512")
        assert server.complete(CANARY, max_tokens=40).ids == canary
        assert server.stop() == 0
