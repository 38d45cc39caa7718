"""Tools, reasoning and structured output over HTTP, with the official client; the engine plays what is wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.lib.streaming.chat import ContentDoneEvent
from pydantic import BaseModel

from steelyard.grammar.thinking import Thinking
from steelyard.text.tools import FORMATS
from steelyard.wire.messages import Vocabulary
from tests.server.served import Served, chunks
from tests.server.test_bad_requests import check_error

CHAT = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "one two"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def tooled(served: Served) -> Iterator[Served]:
    served.service.tool_format, served.service.splits_reasoning = FORMATS["hermes"], True
    yield served
    served.service.tool_format, served.service.splits_reasoning = None, False


def chat(served: Served, **body: Any) -> Any:
    return served.post(CHAT, {"messages": USER, **body})


def joined(parts: list[dict[str, Any]], name: str) -> str:
    return "".join(p["choices"][0]["delta"].get(name) or "" for p in parts)


@pytest.mark.parametrize("per_step", [1, 4, 1000])
def test_tool_calls_whole_and_streamed(tooled: Served, per_step: int) -> None:
    tooled.engine.per_step = per_step
    tooled.say(f"<think>so</think>I add. {CALL}\n{CALL}")
    answer = tooled.openai.chat.completions.create(model="tiny", messages=USER, tools=[TOOL])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "I add. "
    assert message.tool_calls is not None
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [("add", {"a": 1})] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    parts = chunks(tooled, path=CHAT, messages=USER, tools=[TOOL])
    assert joined(parts, "content") == "I add. "
    assert joined(parts, "reasoning_content") == "so"
    calls = [call for p in parts for call in p["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert [p["choices"][0]["finish_reason"] for p in parts if p["choices"][0]["finish_reason"]] == ["tool_calls"]
    one = chat(tooled, tools=[TOOL], parallel_tool_calls=False).json()["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1


def test_required_and_named_calls_are_held_to_a_grammar(served: Served) -> None:
    served.say('[{"name": "add", "parameters": {"a": 5}}]')
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        message = chat(served, tools=[TOOL], tool_choice=choice).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 5}'}
        assert message["content"] is None
        assert '"const":"add"' in served.engine.submits[-1].grammar.replace(" ", "")


def test_the_openai_clients_parse_and_streaming_helpers(served: Served) -> None:
    class Ship(BaseModel):
        name: str
        size: int

    served.say('{"name": "sea", "size": 3}')
    parsed = served.openai.chat.completions.parse(model="tiny", messages=USER, response_format=Ship)
    assert parsed.choices[0].message.parsed == Ship(name="sea", size=3)
    with served.openai.chat.completions.stream(model="tiny", messages=USER, response_format=Ship) as stream:
        done = [event for event in stream if isinstance(event, ContentDoneEvent)]
    assert done[0].parsed == Ship(name="sea", size=3)
    assert "size" in served.engine.submits[-1].grammar
    assert sum(isinstance(m, Vocabulary) for m in served.engine.received) <= 1


def test_every_kind_of_structure_reaches_the_engine_as_a_grammar(served: Served) -> None:
    for kind in ({"json": {"type": "integer"}}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'start: "a"'}):
        for path, body in ((CHAT, {"messages": USER}), ("/v1/completions", {"prompt": "x"})):
            assert served.post(path, {**body, "structured_outputs": kind, "max_tokens": 1}).status_code == 200
            assert served.engine.submits[-1].grammar
    assert chat(served, response_format={"type": "json_object"}, max_tokens=1).status_code == 200
    assert served.engine.submits[-1].grammar
    assert chat(served, response_format={"type": "text"}, max_tokens=1).status_code == 200
    assert not served.engine.submits[-1].grammar


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs.regex",
        ),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    ],
)
def test_what_cannot_be_held_is_refused_by_field(served: Served, body: dict[str, Any], param: str) -> None:
    assert check_error(chat(served, **body))["param"] == param
    assert not served.engine.submits


def test_earlier_calls_and_their_results_reach_the_template(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    assert chat(served, messages=messages, max_tokens=1).status_code == 200
    text = served.tokenizer.decode(served.engine.submits[-1].tokens, skip_special_tokens=False)
    assert "<|im_start|>tool\n2<|im_end|>" in text


@pytest.mark.parametrize("per_step", [1, 4])
def test_d09_d17_reasoning_and_content_stream_as_they_are_whole_with_a_logprob_a_token(
    tooled: Served, per_step: int
) -> None:
    tooled.engine.per_step = per_step
    tooled.say("<think>four and one</think>the answer")
    whole = chat(tooled, logprobs=True).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("four and one", "the answer")
    num_tokens = whole["usage"]["completion_tokens"]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>four and one</think>")}
    parts = chunks(tooled, path=CHAT, messages=USER, logprobs=True)
    assert joined(parts, "reasoning_content") == "four and one"
    assert joined(parts, "content") == "the answer"
    logprobs = [entry for p in parts for entry in p["choices"][0]["logprobs"]["content"]]
    assert len(logprobs) == num_tokens
    cut = chat(tooled, max_completion_tokens=12).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}
    assert cut["choices"][0]["message"] == {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "reasoning_content": "four ",
    }


def test_a_grammar_begins_behind_the_thinking_and_a_budget_bounds_it(tooled: Served) -> None:
    tooled.say('<think>so</think>{"a": 1}')
    message = chat(tooled, response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", '{"a": 1}')
    rules = Thinking.of(tooled.engine.submits[-1].grammar)
    assert rules is not None
    assert rules.answer and not rules.inside and rules.budget is None
    assert tooled.tokenizer.decode(list(rules.closes)) == "</think>"
    assert chat(tooled, thinking_token_budget=7).status_code == 200
    rules = Thinking.of(tooled.engine.submits[-1].grammar)
    assert rules is not None
    assert (rules.answer, rules.budget) == ("", 7)
    assert chat(tooled).status_code == 200
    assert tooled.engine.submits[-1].grammar == ""


def test_d19_a_stop_string_in_the_reasoning_ends_nothing_unless_asked(tooled: Served) -> None:
    tooled.say("<think>STOP it</think>one STOP two")
    message = chat(tooled, stop="STOP").json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("STOP it", "one ")
    message = chat(tooled, stop="STOP", stop_in_reasoning=True).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "refusal": None}
