"""Keys of cached KV blocks: a SHA-256 chain over typed, length-prefixed fields.

    root(fingerprint, layout, namespace) -> h0
    h1 = block_hash(h0, tokens[0:B])      h2 = block_hash(h1, tokens[B:2B])      ...

Two blocks share a key only if model, KV format, namespace and every token up to their end are equal.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

_FORMAT = b"steelyard-kv-1"


def root_hash(fingerprint: str, kv_layout: str, namespace: bytes = b"") -> bytes:
    """The parent of a chain's first block: 32 bytes.

    `fingerprint` names the model and its weights, `kv_layout` dtype and block size, `namespace` the sharing group.
    """
    digest = hashlib.sha256()
    for field in (_FORMAT, fingerprint.encode(), kv_layout.encode(), namespace):
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block holding `tokens` behind `parent`: 32 bytes."""
    digest = hashlib.sha256(parent)
    digest.update(struct.pack("<Q", len(tokens)))
    digest.update(array("I", tokens).tobytes())
    return digest.digest()


def chain(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of all full blocks of `tokens`, in order; a partial last block has none."""
    hashes: list[bytes] = []
    parent = root
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_hash(parent, tokens[end - block_size : end])
        hashes.append(parent)
    return hashes
