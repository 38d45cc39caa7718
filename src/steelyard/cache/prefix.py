"""Which block holds the KV of which key: hash -> block, for one KV group. Holds no references and no order."""

from __future__ import annotations


class PrefixIndex:
    """A two-way map between keys of full blocks (32 bytes) and block ids; each side has at most one of the other.

    Every entry also carries the namespace it was published in, so that a namespace can be forgotten.
    """

    __slots__ = ("_block_of", "_entry_of")

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._entry_of: dict[int, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entry_of

    def get(self, key: bytes) -> int | None:
        """The block holding `key`, or None."""
        return self._block_of.get(key)

    def key_of(self, block_id: int) -> bytes | None:
        entry = self._entry_of.get(block_id)
        return None if entry is None else entry[0]

    def entry_of(self, block_id: int) -> tuple[bytes, bytes]:
        """Key and namespace of a published block."""
        return self._entry_of[block_id]

    def put(self, key: bytes, block_id: int, namespace: bytes) -> bool:
        """Publish a block. False, with nothing changed, if another block already holds the key."""
        assert block_id not in self._entry_of, f"block {block_id} published twice"
        if key in self._block_of:
            return False
        self._block_of[key] = block_id
        self._entry_of[block_id] = (key, namespace)
        return True

    def remove(self, block_id: int) -> None:
        key, _ = self._entry_of.pop(block_id)
        del self._block_of[key]

    def blocks_in(self, namespace: bytes | None) -> list[int]:
        """Published blocks of a namespace and of those below it, which begin with its bytes; of all for None."""
        return [b for b, (_, owner) in self._entry_of.items() if namespace is None or owner.startswith(namespace)]

    def check(self) -> None:
        """Raises AssertionError unless both directions agree."""
        assert len(self._block_of) == len(self._entry_of)
        for block_id, (key, _) in self._entry_of.items():
            assert self._block_of.get(key) == block_id, f"block {block_id} and its key disagree"
