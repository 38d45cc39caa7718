"""What a client may send, as msgspec structs: names and types of fields. sampling.py makes SamplingParams of them.

Ranges are checked in one place, SamplingParams; a field not named here is refused by name. Null always means
"not given". Fields under "no effect" are OpenAI's and change nothing about the answer of this server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from steelyard.errors import InvalidRequest

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What the wire can carry."""
ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
T = TypeVar("T")

MAX_CHOICES = 1024
"""Prompts times n of one request."""
MAX_INPUTS = 2048
"""Of one request for embeddings, as OpenAI's."""
MAX_TOOLS = 128
DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions makes if max_tokens is not given, as OpenAI's does; chat goes on to the model's end."""


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all bodies: unknown fields are refused by name."""


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect: nothing is padded


class JsonSchema(Body, kw_only=True):
    """What `response_format` of type json_schema has. `strict` has no effect: a schema always holds."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(Body, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body, kw_only=True):
    """Exactly one of them: what the output must be."""

    json: dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class FunctionCall(Body, kw_only=True):
    name: str
    arguments: str


class ToolCallPart(Body, kw_only=True):
    """A call an assistant made in an earlier turn."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None


class Function(Body, kw_only=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, kw_only=True):
    type: Literal["function"]
    function: Function


class FunctionName(Body, kw_only=True):
    name: str


class NamedTool(Body, kw_only=True):
    type: Literal["function"]
    function: FunctionName


class AccountBody(Body, kw_only=True):
    """What every request that is computed may say: the model, and on which terms it is served."""

    model: str | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    ttft_deadline_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    ttft_slo_ms: Milliseconds | None = None
    tpot_slo_ms: Milliseconds | None = None
    user: str | None = None  # no effect


class GenerationBody(AccountBody, kw_only=True):
    """Fields shared by completions and chat completions."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: Int | None = None
    return_token_ids: bool | None = None
    return_ledger: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # no effect
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Int | None = None
    add_special_tokens: bool | None = None
    best_of: Int | None = None
    suffix: None = None


class EmbeddingBody(AccountBody, kw_only=True):
    """POST /v1/embeddings. Vectors have length 1 unless `normalize` is false."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None


class TextPart(Body, kw_only=True):
    type: Literal["text"]
    text: str


class Message(Body, kw_only=True):
    """One turn. Parts of a content are joined as they stand."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: None = None
    refusal: None = None
    audio: None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    max_completion_tokens: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    stop_in_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    # no effect
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # not supported
    functions: None = None
    function_call: None = None
    audio: None = None
    modalities: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


class TokenizeBody(Body, kw_only=True):
    """POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


def unsupported_fields(body: type[Body]) -> frozenset[str]:
    """Fields typed as null only: known by name, refused when used."""
    return frozenset(field.name for field in msgspec.structs.fields(body) if field.type is type(None))


def given(value: T | None, default: T) -> T:
    return default if value is None else value


def prompts_of(prompt: str | list[str | int | list[int]], param: str) -> list[str] | list[list[int]]:
    """The prompts in order: all texts, or all token ids. Raises InvalidRequest, naming the field `param`."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {str}:
        return [item for item in prompt if isinstance(item, str)]
    if kinds == {list}:
        return [item for item in prompt if isinstance(item, list)]
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    what = "an empty list" if not prompt else "a mixture"
    raise InvalidRequest(
        f"{param}: must be a string, a list of strings, token ids or lists of token ids, got {what}", param=param
    )
