"""From a body's fields to SamplingParams. Ranges are checked there; here, what fields say about one another."""

from __future__ import annotations

from typing import Any

from steelyard.core.sampling import MAX_N, SamplingParams
from steelyard.errors import InvalidRequest
from steelyard.server.protocol import ChatBody, CompletionBody, GenerationBody, given


def completion_sampling(body: CompletionBody) -> SamplingParams:
    """Raises InvalidRequest for values out of range. max_tokens stays None if it was not given.

    `n` is best_of where that is given: as many are made, and the best n are shown.
    """
    values = _values(body, body.max_tokens)
    asked = [body.prompt_logprobs]
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise InvalidRequest("echo: with logprobs is served without stream only", param="echo")
        asked.append(body.logprobs)
    prompt_logprobs = max((num for num in asked if num is not None), default=None)
    num_made, num_shown, logprobs = given(body.best_of, given(body.n, 1)), given(body.n, 1), body.logprobs
    if num_made != num_shown:
        if num_made < num_shown:
            raise InvalidRequest(f"best_of: must be at least n = {num_shown}, got {num_made}", param="best_of")
        if num_made > MAX_N:
            raise InvalidRequest(f"best_of: must be at most {MAX_N}, got {num_made}", param="best_of")
        if body.stream:
            raise InvalidRequest("best_of: above n it is served without stream only", param="best_of")
        values["n"], logprobs = num_made, given(logprobs, 0)
    return SamplingParams(logprobs=logprobs, prompt_logprobs=prompt_logprobs, **values)


def chat_sampling(body: ChatBody) -> SamplingParams:
    """Raises InvalidRequest for values out of range. max_tokens stays None if it was not given."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest(
            "max_completion_tokens: differs from max_tokens; give one of them", param="max_completion_tokens"
        )
    renamed = {"logprobs": "top_logprobs"}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        renamed["max_tokens"] = "max_completion_tokens"
    logprobs = given(body.top_logprobs, 0) if body.logprobs else None
    try:
        return SamplingParams(logprobs=logprobs, prompt_logprobs=body.prompt_logprobs, **_values(body, max_tokens))
    except InvalidRequest as error:
        param = error.param or ""
        if param in renamed:
            text = error.message.replace(f"{param}:", f"{renamed[param]}:", 1)
            raise InvalidRequest(text, param=renamed[param], code=error.code) from None
        raise


_SAME_NAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def _values(body: GenerationBody, max_tokens: int | None) -> dict[str, Any]:
    """Keyword arguments of SamplingParams for the fields both endpoints have."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs: are served without stream only", param="prompt_logprobs")
    stop = body.stop
    values: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    values["max_tokens"] = max_tokens
    values["stop"] = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    values["stop_token_ids"] = tuple(body.stop_token_ids or ())
    values["logit_bias"] = tuple((body.logit_bias or {}).items())
    return values
