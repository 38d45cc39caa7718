"""From a request's fields to the one grammar its output is held to, or none. Says which field is at fault.

response_format | structured_outputs | tool_choice required or named --> grammar, checked
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from steelyard.errors import InvalidRequest
from steelyard.grammar import source
from steelyard.grammar.source import GrammarChecker
from steelyard.server.protocol import ChatBody, GenerationBody, NamedTool
from steelyard.text.tools import calls_schema


async def grammar_of(body: GenerationBody, checker: GrammarChecker) -> tuple[str, str]:
    """(the grammar as the engine takes it, the field that asks for it); ("", "") for free text. Raises InvalidRequest.

    Large grammars take up to a second to check: in a thread.
    """
    found = [pair for pair in (_response_format(body), _structured(body), _tool_choice(body)) if pair is not None]
    if not found:
        return "", ""
    if len(found) > 1:
        names = " and ".join(param for _, param in found)
        raise InvalidRequest(f"{found[1][1]}: {names} ask for two outputs; give one of them", param=found[1][1])
    make, param = found[0]
    try:
        grammar = await asyncio.to_thread(make)
        await asyncio.to_thread(checker.check, grammar, param)
    except InvalidRequest as error:
        text = error.message if error.param else f"{param}: {error.message}"
        raise InvalidRequest(text, param=param, code=error.code) from None
    return grammar, param


def _response_format(body: GenerationBody) -> tuple[Any, str] | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return (lambda: source.from_json_schema({"type": "object"})), "response_format"
    if form.json_schema is None:
        raise InvalidRequest("response_format.json_schema: is required", param="response_format.json_schema")
    schema = form.json_schema.schema
    return (lambda: source.from_json_schema(schema)), "response_format.json_schema.schema"


def _structured(body: GenerationBody) -> tuple[Any, str] | None:
    asked = body.structured_outputs
    if asked is None:
        return None
    given = source.kinds_given(asked)
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs: exactly one kind must be given, got {', '.join(kind for kind, _ in given) or 'none'}",
            param="structured_outputs",
        )
    [(kind, value)] = given
    return (lambda: source.from_kind(kind, value)), f"structured_outputs.{kind}"


def _tool_choice(body: GenerationBody) -> tuple[Any, str] | None:
    if not isinstance(body, ChatBody) or body.tool_choice in (None, "auto", "none"):
        return None
    tools = [msgspec.to_builtins(tool.function) for tool in body.tools or ()]
    if not tools:
        raise InvalidRequest("tool_choice: there are no tools to choose from", param="tool_choice")
    one = body.parallel_tool_calls is False
    if isinstance(body.tool_choice, NamedTool):
        name, one = body.tool_choice.function.name, True
        tools = [tool for tool in tools if tool["name"] == name]
        if not tools:
            raise InvalidRequest(f"tool_choice: there is no tool {name[:64]!r}", param="tool_choice")
    return (lambda: source.from_json_schema(calls_schema(tools, one))), "tools"
