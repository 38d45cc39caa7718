"""What may come in at all: definite max_tokens, and a refusal with the numbers for what can never fit."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.cache.manager import CacheManager
from steelyard.core.request import Request
from steelyard.errors import ContextLengthExceeded, InvalidRequest

KV_OPTIONS = "--kv-cache-memory-bytes, --gpu-memory-utilization or --num-gpu-blocks-override"
"""What makes the KV pool larger, for messages."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The most positions that one request alone can have at this engine, all others gone; at most the context.

    why     names the limit and its number, for who is refused
    option  what raises it, for who runs the engine
    """

    tokens: int
    why: str
    option: str


def bound_of(cache: CacheManager, step_tokens: int, whole_prompts: bool) -> Bound:
    """What bounds a request besides the context: the pool, or, where prompts are whole, a step of `step_tokens`.

    A prompt that is computed whole takes its blocks at once, those behind a window too; after a preemption so does all
    that was made of it. A request that could have them only bit by bit would wait for ever.
    """
    tokens = cache.capacity_tokens(at_once=whole_prompts)
    if whole_prompts and step_tokens < tokens:
        why = f"a step computes {step_tokens} tokens and prompts are not computed in parts here"
        return Bound(step_tokens, why, "--max-num-batched-tokens")
    why = f"the KV cache pool holds {tokens} tokens of one request"
    if whole_prompts or cache.reserves:
        why += ", which takes its blocks at once here"
    return Bound(tokens, why, KV_OPTIONS)


def settle_max_tokens(request: Request, bound: Bound, max_model_len: int) -> None:
    """Set `request.max_tokens`: as asked if prompt and output can fit alone, or clamped if none was asked.

    The last token is never an input, so `prompt + max_tokens - 1` positions need KV. Raises
    ContextLengthExceeded with prompt, max_tokens and the limit that is in the way; InvalidRequest for an empty prompt.
    A request that is pooled makes no token: its prompt alone must fit.
    """
    prompt_len, asked = request.prompt_len, request.sampling.max_tokens
    if prompt_len == 0:
        raise InvalidRequest("prompt: must have at least 1 token, got 0", param="prompt")
    why = f"the context length is {max_model_len} tokens" if bound.tokens >= max_model_len else bound.why
    if request.pooling:
        if prompt_len > min(max_model_len, bound.tokens):
            raise ContextLengthExceeded(f"the input has {prompt_len} tokens, but {why}; shorten it", param="prompt")
        request.max_tokens = 1  # never sampled: the request ends with its prompt
        return
    most = min(max_model_len, bound.tokens + 1) - prompt_len
    if most < 1 or (asked is not None and asked > most):
        output = f"{asked} of max_tokens" if asked is not None else "at least 1 of output"
        needed = prompt_len + (asked if asked is not None else 1)
        raise ContextLengthExceeded(
            f"prompt has {prompt_len} tokens and with {output} needs {needed}, but {why}; "
            "shorten the prompt or lower max_tokens",
            param="prompt" if most < 1 else "max_tokens",
        )
    request.max_tokens = most if asked is None else asked
