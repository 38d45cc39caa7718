"""What a client may send to /v1/responses, and its translation into a chat: the same template, tools and sampling.

instructions + stored turns + input items --> messages --> ChatBody
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from steelyard.errors import InvalidRequest
from steelyard.server.protocol import (
    MAX_TOOLS,
    AccountBody,
    Body,
    ChatBody,
    Function,
    FunctionCall,
    FunctionName,
    Int,
    JsonSchema,
    Message,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCallPart,
    ToolName,
)

MAX_ITEMS = 4096


class ContentPart(Body, kw_only=True):
    """A piece of a content; `annotations` and `logprobs` of an earlier answer have no effect."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Body, kw_only=True):
    """By its type a message, a call of a function, a call's result, or what the model thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    # no effect
    id: str | None = None
    status: str | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


class FunctionTool(Body, kw_only=True):
    """A function the model may call. `strict` has no effect."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body, kw_only=True):
    type: Literal["function"]
    name: str


class TextFormat(Body, kw_only=True):
    """`schema` is what type json_schema needs."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Body, kw_only=True):
    format: TextFormat | None = None
    verbosity: None = None  # not supported


class ResponseStreamOptions(Body, kw_only=True):
    include_obfuscation: bool | None = None  # no effect: nothing is padded


class ResponsesBody(AccountBody, kw_only=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    # beyond OpenAI's
    top_k: Int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # no effect
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # not supported
    background: None = None
    conversation: None = None
    max_tool_calls: None = None
    prompt: None = None
    reasoning: None = None
    top_logprobs: None = None


_SAME_NAME = """
    model priority cache_salt ttft_deadline_ms deadline_ms ttft_slo_ms tpot_slo_ms stream temperature top_p
    parallel_tool_calls top_k min_p seed repetition_penalty stop chat_template_kwargs
"""


def as_chat(body: ResponsesBody, turns: Sequence[Message]) -> ChatBody:
    """The chat that answers these turns (the stored ones and the input's). Raises InvalidRequest."""
    system = [Message(role="system", content=body.instructions)] if body.instructions else []
    tools = [
        Tool(type="function", function=Function(name=t.name, description=t.description, parameters=t.parameters))
        for t in body.tools or ()
    ]
    choice = body.tool_choice
    return ChatBody(
        messages=[*system, *turns],
        max_completion_tokens=body.max_output_tokens,
        response_format=_format(body.text.format if body.text else None),
        tools=tools or None,
        tool_choice=NamedTool(type="function", function=FunctionName(name=choice.name))
        if isinstance(choice, NamedFunction)
        else choice,
        **{name: getattr(body, name) for name in _SAME_NAME.split()},
    )


def _format(asked: TextFormat | None) -> ResponseFormat | None:
    if asked is None:
        return None
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    if asked.schema is None:
        raise InvalidRequest("text.format.schema: is required", param="text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name=asked.name, schema=asked.schema))


def turns_of(given: str | Sequence[InputItem]) -> list[Message]:
    """Input items as messages; thoughts and calls join the assistant's turn. Raises InvalidRequest."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    turns: list[Message] = []
    thought = ""
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.type or "message"
        if kind == "reasoning":
            thought += _text(item.content)
            continue
        if kind == "function_call_output":
            content = _text(_needed(item.output, f"{where}.output"))
            call_id = _needed(item.call_id, f"{where}.call_id")
            turns.append(Message(role="tool", content=content, tool_call_id=call_id))
            continue
        if kind == "message":
            role = _needed(item.role, f"{where}.role")
            turns.append(Message(role=role, content=_text(_needed(item.content, f"{where}.content"))))
        else:
            if not turns or turns[-1].role != "assistant" or thought:
                turns.append(Message(role="assistant"))
            turns[-1].tool_calls = [*(turns[-1].tool_calls or ()), _call(item, where)]
        if thought and turns[-1].role == "assistant":
            turns[-1].reasoning_content, thought = thought, ""
    return turns


def _call(item: InputItem, where: str) -> ToolCallPart:
    function = FunctionCall(
        name=_needed(item.name, f"{where}.name"), arguments=_needed(item.arguments, f"{where}.arguments")
    )
    return ToolCallPart(id=_needed(item.call_id, f"{where}.call_id"), type="function", function=function)


def _needed(value: Any, where: str) -> Any:
    if value is None:
        raise InvalidRequest(f"{where}: is required here", param=where, code="missing_required_parameter")
    return value


def _text(content: str | Sequence[ContentPart] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


_RENAMED = (
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
)


def in_our_names(error: InvalidRequest) -> InvalidRequest:
    """A refusal of the chat, said of this route's own fields."""
    for chats, ours in _RENAMED:
        if error.param is not None and error.param.startswith(chats):
            error.param = ours + error.param.removeprefix(chats)
            error.message = error.message.replace(chats, ours, 1)
            break
    return error
