"""A fuzz of bytes and of JSON: no 500 and no hang, and a request known from before is answered the same afterwards.

The engine is a real one over a script, on one KV pool for all: what a bad request left behind would show in the canary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer
from tests import tiny_model
from tests.server.real_engine import RealEngine, serve
from tests.server.served import Served
from tests.server.test_bad_requests import CHAT, COMPLETIONS, POSTS, USER, check_error

BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": USER},
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_NAMES = """
    prompt messages n max_tokens temperature stop logprobs top_logprobs logit_bias stream stream_options seed echo
    stop_token_ids chat_template_kwargs min_tokens priority model tokens response_format add_special_tokens input text
    tools tool_choice best_of prompt_logprobs dimensions previous_response_id instructions structured_outputs
"""
FIELDS = st.sampled_from(_NAMES.split())


@pytest.fixture(scope="module")
def fuzzed(tokenizer: Tokenizer) -> Iterator[Served]:
    template = ChatTemplate(tiny_model.TEMPLATE, tiny_model.BOS, tiny_model.IM_END)
    for served in serve(tokenizer, template, RealEngine(vocab_size=tokenizer.vocab_size), max_body_bytes=100_000):
        before = canary(served)
        yield served
        assert canary(served) == before
        assert served.engine.engine.cache.usage().active == 0  # type: ignore[attr-defined]
        assert served.service.admission.num_requests == served.service.num_in_flight == 0


def canary(served: Served) -> Any:
    return served.complete(temperature=0, max_tokens=5, return_token_ids=True).json()["choices"]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(POSTS), body=st.dictionaries(FIELDS, JSON, max_size=5), typical=st.booleans())
def test_no_json_gives_a_500(fuzzed: Served, path: str, body: dict[str, Any], typical: bool) -> None:
    base: dict[str, Any] = BASES.get(path, {}) if typical else {}
    raw = json.dumps({**base, **body}).encode()
    response = fuzzed.http.post(path, content=raw)
    assert response.status_code < 500, (raw, response.text)
    if response.status_code >= 400:
        check_error(response, response.status_code)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(POSTS), raw=st.binary(max_size=60))
def test_no_bytes_give_a_500(fuzzed: Served, path: str, raw: bytes) -> None:
    check_error(fuzzed.http.post(path, content=raw))
