"""/v1/responses with the official client: text, named events, tools, formats, and going on from an earlier answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from steelyard.core.request import FinishReason
from steelyard.server import response_store
from steelyard.server.protocol import Message
from steelyard.server.response_store import ResponseNotFound, ResponseStore
from steelyard.server.tenants import Tenant, Tenants
from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer
from steelyard.text.tools import FORMATS
from tests import tiny_model
from tests.server.real_engine import RealEngine, serve
from tests.server.served import Served
from tests.server.test_bad_requests import check_error

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def tooled(served: Served) -> Iterator[Served]:
    served.service.tool_format, served.service.splits_reasoning = FORMATS["hermes"], True
    yield served
    served.service.tool_format, served.service.splits_reasoning = None, False


def prompt_text(served: Served) -> str:
    return served.tokenizer.decode(served.engine.submits[-1].tokens, skip_special_tokens=False)


def raw_events(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The events, each named by its own type and numbered in order, by a strict reader."""
    response = served.post(PATH, {"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.text.endswith("\n\n") and "[DONE]" not in response.text
    found = []
    for number, block in enumerate(response.text[:-2].split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


def test_a_text_and_what_it_used(served: Served) -> None:
    served.say("five sail")
    answer = served.openai.responses.create(model="tiny", input="one two", instructions="be brief", temperature=0.5)
    assert (answer.output_text, answer.status, answer.object) == ("five sail", "completed", "response")
    assert answer.temperature == 0.5 and answer.instructions == "be brief"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(served.engine.submits[-1].tokens)
    assert answer.usage.output_tokens == len("five sail") + 1
    assert "system\nbe brief<|im_end|>\n<|im_start|>user\none two<|im_end|>" in prompt_text(served)
    cut = served.openai.responses.create(model="tiny", input="one two", max_output_tokens=3)
    assert (cut.status, cut.output_text) == ("incomplete", "fiv")
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("per_step", [1, 4, 1000])
def test_events_tell_the_same_as_the_whole(tooled: Served, per_step: int) -> None:
    tooled.engine.per_step = per_step
    tooled.say(f"<think>so</think>I add. {CALL}")
    body: dict[str, Any] = {"model": "tiny", "input": "one two", "tools": [TOOL]}
    whole = tooled.post(PATH, body).json()
    found = raw_events(tooled, **body)
    types = [event["type"] for event in found]
    assert types[:2] == ["response.created", "response.in_progress"] and types[-1] == "response.completed"
    last = found[-1]["response"]

    def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]

    assert bare(last["output"]) == bare(whole["output"])
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for kind, text in (("output_text", "I add. "), ("reasoning_text", "so"), ("function_call_arguments", '{"a": 1}')):
        assert "".join(e["delta"] for e in found if e["type"] == f"response.{kind}.delta") == text
    added = {event["item"]["id"]: event["output_index"] for event in found if event["type"].endswith("item.added")}
    assert all(added[e["item_id"]] == e["output_index"] for e in found if "item_id" in e)


def test_the_official_client_streams_parses_and_is_async(tooled: Served) -> None:
    class Ship(BaseModel):
        name: str
        size: int

    tooled.say('{"name": "sea", "size": 3}')
    parsed = tooled.openai.responses.parse(model="tiny", input="one two", text_format=Ship)
    assert parsed.output_parsed == Ship(name="sea", size=3)
    assert "size" in tooled.engine.submits[-1].grammar
    with tooled.openai.responses.stream(model="tiny", input="one two", text_format=Ship) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == Ship(name="sea", size=3)
    assert kinds.count("response.output_text.delta") == len('{"name": "sea", "size": 3}')
    texts = tooled.openai.responses.create(model="tiny", input="one two", stream=True)
    assert "".join(e.delta for e in texts if e.type == "response.output_text.delta") == '{"name": "sea", "size": 3}'


def test_a_tool_is_called_and_its_result_goes_back(tooled: Served) -> None:
    tooled.say(CALL)
    client = tooled.openai
    first = client.responses.create(model="tiny", input="one two", tools=[TOOL])
    [call] = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    tooled.say("two")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    second = client.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=[TOOL])
    assert second.output_text == "two"
    assert "user\none two<|im_end|>" in prompt_text(tooled) and "tool\n2<|im_end|>" in prompt_text(tooled)
    history: Any = [{"role": "user", "content": "one two"}, *first.output, result]
    by_hand = client.responses.create(model="tiny", input=history, tools=[TOOL], store=False)
    assert by_hand.output_text == "two"
    assert tooled.engine.submits[-1].tokens == tooled.engine.submits[-2].tokens
    tooled.say('[{"name": "add", "parameters": {"a": 5}}]')
    for choice in ("required", {"type": "function", "name": "add"}):
        forced = client.responses.create(model="tiny", input="x", tools=[TOOL], tool_choice=choice)  # type: ignore
        assert [item.type for item in forced.output] == ["function_call"]


def test_a_conversation_goes_on_without_its_instructions(served: Served) -> None:
    served.say("five sail")
    first = served.openai.responses.create(model="tiny", input="one", instructions="be brief")
    again = served.openai.responses.retrieve(first.id)
    assert again.output_text == "five sail"
    served.openai.responses.create(model="tiny", input="two", previous_response_id=first.id)
    text = prompt_text(served)
    assert "user\none<|im_end|>\n<|im_start|>assistant\nfive sail<|im_end|>\n<|im_start|>user\ntwo" in text
    assert "be brief" not in text
    served.openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        served.openai.responses.retrieve(first.id)
    error = check_error(served.post(PATH, {"input": "x", "previous_response_id": first.id}), 404)
    assert (error["param"], error["code"]) == ("previous_response_id", "response_not_found")
    unkept = served.openai.responses.create(model="tiny", input="one", store=False)
    assert check_error(served.http.get(f"{PATH}/{unkept.id}"), 404)["code"] == "response_not_found"


KEYS = {name: hashlib.sha256(name.encode()).digest() for name in ("acme", "other")}


def table(**more: bytes) -> Tenants:
    """Two tenants whose keys are their names, and more keys."""
    return Tenants([Tenant(n, key_hashes=(key, *([more[n]] if n in more else []))) for n, key in KEYS.items()], b"x")


@pytest.fixture
def two(tokenizer: Tokenizer) -> Iterator[Served]:
    template = ChatTemplate(tiny_model.TEMPLATE, tiny_model.BOS, tiny_model.IM_END)
    yield from serve(tokenizer, template, RealEngine(vocab_size=tokenizer.vocab_size), tenants=table())


def test_a_tenant_finds_its_own_answers_only_and_none_once_it_has_lost_a_key(two: Served) -> None:
    def ask(name: str, method: str, path: str = PATH, **body: Any) -> Any:
        head = {"authorization": f"Bearer {name}"}
        return two.http.request(method, path, headers=head, json=body or None)

    id = ask("acme", "POST", input="one", max_output_tokens=3).json()["id"]
    assert ask("acme", "GET", f"{PATH}/{id}").json()["id"] == id
    assert check_error(ask("other", "GET", f"{PATH}/{id}"), 404)["code"] == "response_not_found"
    check_error(ask("other", "DELETE", f"{PATH}/{id}"), 404)
    check_error(ask("other", "POST", input="two", previous_response_id=id), 404)
    assert ask("acme", "POST", input="two", previous_response_id=id, max_output_tokens=3).status_code == 200
    two.run(two.service.set_tenants, table(acme=b"y" * 32))
    assert ask("acme", "GET", f"{PATH}/{id}").status_code == 200, "it has gained a key and lost none"
    two.run(two.service.set_tenants, table())
    assert ask("acme", "GET", f"{PATH}/{id}").status_code == 404


def test_the_async_client_and_the_streaming_helper_with_tools(tooled: Served) -> None:
    class Add(BaseModel):
        """adds"""

        a: int

    tooled.say('<tool_call>\n{"name": "Add", "arguments": {"a": 1}}\n</tool_call>')

    function: Any = openai.pydantic_function_tool(Add)["function"]

    async def ask() -> Any:
        async with tooled.async_openai as client:
            asked = await client.responses.parse(model="tiny", input="x", tools=[{"type": "function", **function}])
            return [item.parsed_arguments for item in asked.output if item.type == "function_call"]

    assert asyncio.run(ask()) == [{"a": 1}]
    user: Any = [{"role": "user", "content": "one two"}]
    tools = [openai.pydantic_function_tool(Add)]
    with tooled.openai.chat.completions.stream(model="tiny", messages=user, tools=tools) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [event.parsed_arguments for event in done] == [Add(a=1)] == [call.function.parsed_arguments]


def test_what_is_kept_is_bounded_by_time_number_and_bytes_and_is_each_tenants_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = 0
    store = ResponseStore(lambda: now_ns)
    turns = [Message(role="user", content="x" * 100)]
    monkeypatch.setattr(response_store, "MAX_KEPT", 3)
    monkeypatch.setattr(response_store, "MAX_KEPT_BYTES", 1800)
    for number in range(5):
        store.keep("a", f"r{number}", turns, {"id": number})
    store.keep("b", "r0", turns, {})

    def has(tenant: str, id: str) -> bool:
        try:
            store.get(tenant, id)
        except ResponseNotFound:
            return False
        return True

    assert [has("a", f"r{number}") for number in range(5)] == [False, False, True, True, True]
    assert has("b", "r0") and not has("b", "r4")
    store.keep("a", "large", [Message(role="user", content="x" * 1500)], {})
    assert has("a", "large") and not has("a", "r4") and has("b", "r0")
    now_ns = response_store.TTL_S * 10**9
    assert not has("a", "large") and not has("b", "r0")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "messages": []}, "messages"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
            "text.format.schema",
        ),
        ({"input": "x", "tools": [TOOL]}, "tools"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"role": "user", "content": "x"}] * 2}, "input"),
    ],
)
def test_what_cannot_be_served_is_refused_by_this_routes_own_fields(
    served: Served, body: dict[str, Any], param: str
) -> None:
    error = check_error(served.post(PATH, body))
    assert error["param"] == param
    assert "response_format" not in error["message"] and "messages:" not in error["message"].replace(param, "")


def test_a_failure_after_the_first_event_is_an_error_event(served: Served) -> None:
    served.engine.fail_at = 2
    with pytest.raises(openai.APIError, match="not a number"):
        list(served.openai.responses.create(model="tiny", input="x", stream=True))
    served.engine.fail_at = 0
    response = served.post(PATH, {"input": "x", "stream": False})
    assert response.status_code == 500
    served.engine.fail_at = None
    served.engine.end_with = FinishReason.DEADLINE.value
    answer = served.post(PATH, {"input": "x", "max_output_tokens": 2}).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "deadline"})
