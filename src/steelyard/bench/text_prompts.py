"""Prompts as text for servers that take no token ids: words added until the tokenizer counts the asked length."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from steelyard.bench.workload import PlannedRequest
from steelyard.errors import InvalidRequest

_COMMON = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue side "
    "kind head house service friend father power hour game line end member law car city community name "
    "president team minute idea kid body back "
)
WORDS = _COMMON.split()
_FILL = (" a", ".", "\n", "!")


def as_text(
    requests: Sequence[PlannedRequest], num_tokens: Callable[[str], int], seed: int, nonce: str
) -> list[PlannedRequest]:
    """The same requests with text of the same number of tokens. Shared prefixes and histories are not carried over.

    Raises InvalidRequest where a text of exactly that length was not found, or the workload shares prefixes: cutting
    text where tokens end is not possible in general.
    """
    if any(r.shared_len for r in requests):
        raise InvalidRequest("shared prefixes and turns need token ids: use --prompt-kind ids", param="prompt_kind")
    found = []
    for request in requests:
        draw = random.Random(f"text {seed} {nonce} {request.id}")
        text = text_of_length(len(request.prompt_ids), num_tokens, draw, f"{_mark(nonce, request.id)}: ")
        found.append(replace(request, text=text))
    return found


def _mark(nonce: str, request_id: int) -> str:
    """What a prompt begins with. The nonce itself would be the same first block of every prompt of the run."""
    return hashlib.sha256(f"{nonce} {request_id}".encode()).hexdigest()[:12]


def text_of_length(length: int, num_tokens: Callable[[str], int], draw: random.Random, head: str = "") -> str:
    """A text of exactly `length` tokens that begins with `head`, where that fits. Raises InvalidRequest."""
    if num_tokens(head) > length:
        head = ""
    words = [" " + draw.choice(WORDS) for _ in range(length + 8)]
    low, high = 0, len(words)
    while low < high:  # the most words that do not exceed the length
        middle = (low + high + 1) // 2
        if num_tokens(head + "".join(words[:middle])) <= length:
            low = middle
        else:
            high = middle - 1
    text = head + "".join(words[:low])
    for _ in range(16):
        if num_tokens(text) == length:
            return text
        text = next((text + fill for fill in _FILL if num_tokens(text + fill) <= length), text)
    raise InvalidRequest(f"found no text of exactly {length} tokens for this tokenizer", param="random_input_len")
