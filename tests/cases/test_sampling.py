"""Section P: sampling and validation; and those of section A that need no more than this surface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.cases.rig import Answer, Server, same_as_solo, texts

Prompts = Callable[[int], list[int]]
Solo = Callable[..., Answer]


def refused(response: httpx.Response, *words: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    for word in words:
        assert word in error["message"], error


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("logit_bias", [{"999999": 5}]),
        ("stop_token_ids", [[999999], [-1]]),
        ("temperature", [-1, 5]),
        ("top_p", [0, 1.5]),
        ("min_p", [2]),
        ("top_k", [-5]),
        ("n", [0, 100000]),
        ("presence_penalty", [3]),
        ("frequency_penalty", [-3]),
        ("max_tokens", [-1, 0]),
        ("logprobs", [1000]),
    ],
)
def test_p01_p03_p05_p13_values_out_of_range_are_refused_by_name(server: Server, field: str, values: list[Any]) -> None:
    for value in values:
        refused(server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3, field: value}), field)


def test_p13_nan_is_refused(server: Server) -> None:
    refused(server.http.post("/v1/completions", content=b'{"prompt": [5], "temperature": NaN}'), "JSON")


@pytest.mark.parametrize("temperature", [1e-4, 1e-7, 1e-30])
def test_p07_a_very_small_temperature_is_greedy(
    server: Server, prompts: Prompts, solo: Solo, temperature: float
) -> None:
    prompt = prompts(20)
    answer = server.complete(prompt, max_tokens=12, temperature=temperature, seed=3)
    same_as_solo(answer, solo(prompt, max_tokens=12))


def test_p09_choices_differ_repeat_and_end_by_themselves(server: Server, prompts: Prompts) -> None:
    body: dict[str, Any] = {"prompt": prompts(16), "n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 20}
    runs = [server.completions(**body, return_token_ids=True)["choices"] for _ in range(2)]
    ids = [[choice["token_ids"] for choice in run] for run in runs]
    assert ids[0] == ids[1]
    assert len({tuple(choice) for choice in ids[0]}) == 4
    chunks = texts(server.stream(**body, ignore_eos=True, return_token_ids=True))
    for index in range(4):
        assert [t for c in chunks if c["index"] == index for t in c["token_ids"]] == ids[0][index]


def test_p15_one_bos(server: Server) -> None:
    messages = [{"role": "user", "content": "one two"}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert tokens.count(0) == 1
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    twice = server.post("/tokenize", {"messages": messages, "add_special_tokens": True}).json()["tokens"]
    assert twice.count(0) == 1


def test_p17_a_seed_decides_whatever_runs_beside_it(server: Server, prompts: Prompts) -> None:
    body: dict[str, Any] = {"prompt": prompts(20), "max_tokens": 20, "temperature": 1.0}
    fillers = [{"prompt": prompts(10 + i), "max_tokens": 30, "temperature": 1.0} for i in range(8)]
    asked = [*fillers[:4], {**body, "seed": 1}, *fillers[4:], {**body, "seed": 1}, {**body, "seed": 2}]
    answers = server.together(asked)
    assert answers[4].ids == answers[9].ids
    assert answers[4].ids != answers[10].ids
    assert server.complete(**body, seed=1).ids == answers[4].ids


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a01_a03_what_is_no_json_object_is_a_400(server: Server, path: str) -> None:
    for raw in (b'{"prompt": "a"} x', b"[]", b"true", b"null", b"123", b'"x"', b""):
        refused(server.http.post(path, content=raw))


def test_a07_a_prompt_too_long_is_refused_with_the_true_numbers(server: Server, prompts: Prompts) -> None:
    for length, max_tokens in ((2048, 1), (2049, 1), (2000, 100)):
        response = server.post("/v1/completions", {"prompt": prompts(length), "max_tokens": max_tokens})
        refused(response, str(length), "2048")
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a09_a_template_that_refuses_is_a_400(server: Server) -> None:
    user = {"role": "user", "content": "x"}
    refused(server.post("/v1/chat/completions", {"messages": [user, user]}), "two user turns in a row")
    refused(server.post("/v1/chat/completions", {"messages": [{"role": "martian", "content": "x"}]}), "martian")
    refused(server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}), "content")
