"""What routes answer, as structs for the API's description. Nothing is made of them: tests hold answers against them.

A field that may be absent is UNSET by default.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all prompts and choices together.

    context_bounded_to  only where --kv-window hid some of a choice's tokens: how many it saw at most
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    context_bounded_to: int | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    ledger: dict[str, Any] | UnsetType = UNSET


class AnsweredCallFunction(msgspec.Struct):
    name: str
    arguments: str


class AnsweredCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: AnsweredCallFunction


class AnsweredMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]


class ChatChoice(msgspec.Struct):
    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    ledger: dict[str, Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class InputUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """Numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(msgspec.Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: InputUsage


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseAnswer(msgspec.Struct):
    """`output`: messages, reasoning and function calls in the order they came; the rest is what was asked."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float


class DeletedAnswer(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    bos_token: str | None
    eos_token: str | None
    vocab_size: int
    model_max_length: int
    chat_template: str | None


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(msgspec.Struct):
    version: str


class StatusAnswer(msgspec.Struct):
    status: Literal["ok"]


class UnavailableAnswer(msgspec.Struct):
    status: Literal["unavailable"]
    reason: str


class RequestRecord(msgspec.Struct):
    """One request's account. `buckets_ns` sum to `total_ns`; choices and deliveries are in /ledger/requests/{id}."""

    id: str
    endpoint: str
    tenant: str
    total_ns: int
    buckets_ns: dict[str, int]


class RequestsAnswer(msgspec.Struct):
    requests: list[RequestRecord]


class StepsAnswer(msgspec.Struct):
    steps: list[dict[str, Any]]


class ApiError(msgspec.Struct):
    """`param` is the path of the field at fault, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ApiError
