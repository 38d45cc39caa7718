"""Keys differ whenever model, layout, namespace or any token up to the block's end differs."""

from __future__ import annotations

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from steelyard.core.hashing import block_hash, chain, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_a_root_is_the_digest_of_its_length_prefixed_fields() -> None:
    fields = (b"steelyard-kv-1", b"model", b"bf16/16", b"tenant")
    plain = b"".join(struct.pack("<Q", len(field)) + field for field in fields)
    assert root_hash("model", "bf16/16", b"tenant") == hashlib.sha256(plain).digest()


def test_fields_do_not_run_into_each_other() -> None:
    roots = {root_hash("ab", "c", b"d"), root_hash("a", "bc", b"d"), root_hash("ab", "", b"cd"), root_hash("ab", "cd")}
    assert len(roots) == 4


@given(TOKENS, st.integers(1, 9))
def test_a_chain_has_a_key_for_each_full_block_and_none_for_a_partial_one(tokens: list[int], size: int) -> None:
    root = root_hash("m", "l")
    keys = chain(root, tokens, size)
    assert len(keys) == len(tokens) // size
    parent = root
    for i, key in enumerate(keys):
        parent = block_hash(parent, tokens[i * size : (i + 1) * size])
        assert key == parent and len(key) == 32


@given(TOKENS.filter(lambda t: len(t) >= 4), st.data())
def test_changing_a_token_changes_its_key_and_all_that_follow_and_none_before(
    tokens: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = chain(bytes(32), tokens, 4), chain(bytes(32), changed, 4)
    for i, (old, new) in enumerate(zip(before, after)):
        assert (old == new) == (i < at // 4)


def test_equal_blocks_in_two_namespaces_have_different_keys() -> None:
    one, two = (chain(root_hash("m", "l", name), [1, 2, 3, 4], 2) for name in (b"a", b"b"))
    assert not set(one) & set(two)
