"""The last prompts as hashes: where they are alike can be seen, and nothing of what they say.

Each token becomes 64 bits of a keyed hash (BLAKE2b, RFC 7693). The key is drawn when the engine starts and never
leaves it, so a hash cannot be looked up in a table of tokens, nor compared with another engine's.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from steelyard.core.request import Request

MAX_PROMPTS = 64
MAX_TOKENS = 8192
"""Of each prompt, from its beginning: an answer must fit a message."""


class PromptHashes:
    """One engine's key, and the hashes it makes."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key if key is not None else secrets.token_bytes(16)
        self._of = lru_cache(1 << 16)(self._hash)

    def of(self, requests: Iterable[Request]) -> list[dict[str, Any]]:
        """By request: its prompt's hashes, first choices only, since the others have the same prompt."""
        return [
            {
                "prompt_tokens": request.prompt_len,
                "cached_tokens": request.cached_tokens,
                "token_hashes": [self._of(token) for token in request.tokens[: min(request.prompt_len, MAX_TOKENS)]],
            }
            for request in requests
            if request.index == 0
        ]

    def _hash(self, token: int) -> int:
        found = blake2b(token.to_bytes(8, "little"), key=self._key, digest_size=8).digest()
        return int.from_bytes(found, "little") >> 11  # JSON readers keep 53 bits
