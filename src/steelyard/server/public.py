"""Prefixes that an operator has declared public: their blocks are shared by all tenants, and nothing behind them.

    prompt  | public block | public block | private ... |    keys: public chain, then the tenant's own from there on

The last full block of a prompt is always the tenant's own, so that what is generated behind it is as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steelyard.core.hashing import chain, root_hash
from steelyard.errors import StartError, reason
from steelyard.text.tokenizer import Tokenizer
from steelyard.wire.messages import Ready

_NAMESPACE = b"public"
"""Of six bytes: no tenant's has so many."""


class PublicPrefixes:
    """Keys of prompts' blocks where prefixes are declared. Values only; safe in a thread."""

    def __init__(self, prefixes: Sequence[Sequence[int]], ready: Ready) -> None:
        self._ready = ready
        root = root_hash(ready.fingerprint, ready.kv_layout, _NAMESPACE)
        self._chains = [(list(prefix), chain(root, prefix, ready.block_size)) for prefix in prefixes]

    def keys(self, ids: Sequence[int], namespace: bytes) -> list[bytes]:
        """Of all full blocks of a prompt: of the longest declared prefix, then in `namespace`."""
        size, ready = self._ready.block_size, self._ready
        most = len(ids) // size - 1
        public: list[bytes] = []
        for prefix, keys in self._chains:
            num_equal = 0
            for start in range(0, min(most, len(keys)) * size, size):
                if ids[start : start + size] != prefix[start : start + size]:
                    break
                num_equal += 1
            public = max(public, keys[:num_equal], key=len)
        own = namespace + public[-1] if public else namespace
        root = root_hash(ready.fingerprint, ready.kv_layout, own)
        return public + chain(root, ids[len(public) * size :], size)


def load_public(paths: Sequence[str], tokenizer: Tokenizer | None, ready: Ready) -> PublicPrefixes | None:
    """Of files with a text each, as a prompt begins with it: after the chat template, if it is a chat's.

    Raises StartError for a file that cannot be read, or is shorter than a block.
    """
    if not paths:
        return None
    prefixes: list[list[int]] = []
    for path in paths:
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeError) as error:
            raise StartError(f"--public-prefix {path}: {reason(error)}") from None
        if tokenizer is None:
            raise StartError(f"--public-prefix {path}: this server has no tokenizer for it")
        variants = [tokenizer.encode(text, special) for special in (False, True)]
        if max(map(len, variants)) < ready.block_size:
            raise StartError(
                f"--public-prefix {path}: {len(variants[0])} tokens are less than a block of {ready.block_size}, "
                "of which nothing can be shared"
            )
        prefixes += variants
    return PublicPrefixes(prefixes, ready)
