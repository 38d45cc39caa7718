"""What may come in at all: definite max_tokens, and a refusal with the numbers for what can never fit."""

from __future__ import annotations

from steelyard.cache.manager import CacheManager
from steelyard.core.request import Request
from steelyard.errors import ContextLengthExceeded, InvalidRequest


def settle_max_tokens(request: Request, cache: CacheManager, max_model_len: int) -> None:
    """Set `request.max_tokens`: as asked if prompt and output can fit alone, or clamped if none was asked.

    The last token is never an input, so `prompt + max_tokens - 1` positions need KV. Raises
    ContextLengthExceeded with prompt, max_tokens and both limits; InvalidRequest for an empty prompt. A request that
    is pooled makes no token: its prompt alone must fit.
    """
    prompt_len, asked = request.prompt_len, request.sampling.max_tokens
    if prompt_len == 0:
        raise InvalidRequest("prompt: must have at least 1 token, got 0", param="prompt")
    pool_tokens = cache.capacity_tokens()
    if request.pooling:
        if prompt_len > min(max_model_len, pool_tokens):
            raise ContextLengthExceeded(
                f"the input has {prompt_len} tokens, but the context length is {max_model_len} tokens and the KV cache "
                f"pool holds {pool_tokens}; shorten it",
                param="prompt",
            )
        request.max_tokens = 1  # never sampled: the request ends with its prompt
        return
    most = min(max_model_len - prompt_len, pool_tokens + 1 - prompt_len)
    if most < 1 or (asked is not None and asked > most):
        output = f"{asked} of max_tokens" if asked is not None else "at least 1 of output"
        needed = prompt_len + (asked if asked is not None else 1)
        raise ContextLengthExceeded(
            f"prompt has {prompt_len} tokens and with {output} needs {needed}, but the context length is "
            f"{max_model_len} tokens and the KV cache pool holds {pool_tokens}; shorten the prompt or lower max_tokens",
            param="prompt" if most < 1 else "max_tokens",
        )
    request.max_tokens = most if asked is None else asked
