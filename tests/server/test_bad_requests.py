"""Whatever a client sends: a 4xx with our JSON and the field's path, never a 500, and the next request is served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.fake_engine import MAX_MODEL_LEN
from tests.server.served import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
POSTS = [COMPLETIONS, CHAT, "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize"]
USER = [{"role": "user", "content": "x"}]


def check_error(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", -1, "temperature"),
        ("temperature", 5, "temperature"),
        ("temperature", "hot", "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", 1.5, "top_p"),
        ("min_p", 2, "min_p"),
        ("top_k", -5, "top_k"),
        ("n", 0, "n"),
        ("n", 100000, "n"),
        ("n", 10**30, "n"),
        ("presence_penalty", 3, "presence_penalty"),
        ("frequency_penalty", -3, "frequency_penalty"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", "16", "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("min_tokens", 17, "min_tokens"),
        ("seed", 2**70, "seed"),
        ("seed", 10**40, "seed"),
        ("logit_bias", {"999999": 5}, "logit_bias"),
        ("logit_bias", {"-1": 5}, "logit_bias"),
        ("logit_bias", {"10000000000000000000000000000": 5}, "logit_bias"),
        ("logit_bias", {"a": 5}, "logit_bias"),
        ("logit_bias", {"5": 101}, "logit_bias"),
        ("stop_token_ids", [999999], "stop_token_ids"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("stop", "", "stop"),
        ("stop", ["x"] * 100, "stop"),
        ("priority", 2**63, "priority"),
        ("tools", 5, "tools"),
        ("suffix", "x", "suffix"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("stream_options", {"nothing": True}, "stream_options.nothing"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("foo", 1, "foo"),
        ("model", "gpt-9", "model"),
        ("cache_salt", 5, "cache_salt"),
        ("priority", 1, "priority"),
        ("deadline_ms", 0, "deadline_ms"),
        ("ttft_deadline_ms", -1, "ttft_deadline_ms"),
    ],
)
def test_a_bad_field_is_named(served: Served, field: str, value: Any, param: str) -> None:
    for path, base in ((COMPLETIONS, {"prompt": "x", "max_tokens": 16}), (CHAT, {"messages": USER, "max_tokens": 16})):
        error = check_error(served.post(path, {**base, field: value}), 404 if field == "model" else 400)
        assert error["param"] == param
        assert param.split(".")[-1] in error["message"]
    assert not served.engine.submits


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, [2]]}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [320]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": [[1, "a"]]}, "prompt[0][1]"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": "", "add_special_tokens": False}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 1025}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 1000}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0, "echo": True}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "best_of": 500}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {"messages": USER, "thinking_token_budget": 5}, "thinking_token_budget"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "martian", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": USER, "max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
    ],
)
def test_a_bad_body_is_refused_with_the_path(served: Served, path: str, body: Any, param: str) -> None:
    assert check_error(served.post(path, body))["param"] == param
    assert not served.engine.submits


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'; it can be \"text\""),
        (CHAT, {"messages": USER, "tool_choice": "x"}, 'it can be "auto" or "none" or "required"'),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, 'it can be "last" or "mean"'),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, 'it can be "function"'),
    ],
)
def test_a_word_that_is_none_of_a_few_is_refused_with_these(served: Served, path: str, body: Any, words: str) -> None:
    assert words in check_error(served.post(path, body))["message"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"prompt": x}',
        b'{"prompt": "a"} x',
        b"[]",
        b"true",
        b"null",
        b"123",
        b'"x"',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": '
        + b"[" * 20_000
        + b"]" * 20_000
        + b"}}",
        b'{"prompt": ' + b"[" * 40_000,
        b'{"tokens": [1, 2',
        b"\x00\x01\x02",
    ],
    ids=range(16),
)
def test_raw_bytes_that_are_no_request(served: Served, path: str, raw: bytes) -> None:
    check_error(served.http.post(path, content=raw))


def test_a_body_too_large_is_refused_declared_or_not(served: Served) -> None:
    big = json.dumps({"prompt": "x" * 200_000}).encode()
    assert check_error(served.http.post(COMPLETIONS, content=big), 413)["code"] == "body_too_large"
    chunked = (big[i : i + 8192] for i in range(0, len(big), 8192))
    check_error(served.http.post(COMPLETIONS, content=chunked), 413)
    assert served.complete(max_tokens=1).status_code == 200


def test_a_text_too_long_for_any_encoding_is_refused_unencoded(served: Served) -> None:
    response = served.complete(prompt="x" * (MAX_MODEL_LEN * 12 + 100))
    error = check_error(response)
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in error["message"]


def test_fields_without_effect_are_accepted(served: Served) -> None:
    extra = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "seed": None, "suffix": None}
    assert served.complete(**extra, max_tokens=1).status_code == 200
    body = {
        "messages": USER,
        "max_tokens": 1,
        **extra,
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
    }
    del body["suffix"]
    assert served.post(CHAT, body).status_code == 200


def test_unknown_routes_and_methods_answer_in_json(served: Served) -> None:
    assert check_error(served.http.get("/nothing"), 404)["code"] == "not_found"
    assert check_error(served.http.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
    assert served.http.get("/v1/models/tiny").json()["id"] == "tiny"
    response = served.http.get(COMPLETIONS)
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    check_error(served.http.post("/health"), 405)
