"""A pool of KV blocks of one group: reference counts and the order in which free blocks are taken.

    taken first                                    taken last
    [ clean ... clean ][ cached: least recent ... most recent ]        active: references > 0, not in line
                         (of several tenants: of who is over its share; see `eviction`)

A free block whose contents are published stays findable until it is taken. All operations are O(1) a block.
Knows no request and no token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from steelyard.cache.eviction import CachedBlocks
from steelyard.cache.prefix import PrefixIndex

NULL_BLOCK = 0
"""Readable by everyone, written by nobody, never counted: stands for blocks behind a window."""


class BlockPool:
    """Blocks 1 .. num_blocks; block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self.on_evict: Callable[[int, bytes, bytes], None] | None = None
        """Told of a cached block that is about to be taken: its id, key and namespace."""
        self._refs = [0] * (num_blocks + 1)
        self._clean = list(range(num_blocks, 0, -1))
        self._cached = CachedBlocks()
        self.num_fragmented = 0  # requests refused although enough blocks were free
        self.most_active = 0
        self.num_found_again = 0  # cached blocks that a request found
        self.num_evicted = 0  # cached blocks that were taken for something else: nobody came back for them

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, clean and cached."""
        return len(self._clean) + len(self._cached)

    @property
    def num_clean(self) -> int:
        return len(self._clean)

    @property
    def largest_run(self) -> int:
        """The most blocks one request could take now: any block will do, so all that are free."""
        return self.num_free

    def fits(self, count: int, spare: int = 0) -> bool:
        """Whether `count` blocks can be taken and `spare` left."""
        return count + spare <= self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold published contents."""
        return len(self._cached)

    def cached_ids(self) -> list[int]:
        """Those blocks, least recently used first."""
        return list(self._cached)

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has seen that they are there."""
        assert count <= self.num_free, f"{count} blocks asked of {self.num_free} free"
        taken: list[int] = []
        for _ in range(count):
            if self._clean:
                block_id = self._clean.pop()
            else:
                block_id = self._cached.pop()
                if self.on_evict is not None:
                    self.on_evict(block_id, *self.index.entry_of(block_id))
                self.index.remove(block_id)
                self.num_evicted += 1
            self._refs[block_id] = 1
            taken.append(block_id)
        self.most_active = max(self.most_active, self.num_blocks - self.num_free)
        return taken

    def touch(self, block_id: int) -> None:
        """One more reference to an active or cached block."""
        if self._refs[block_id] == 0:
            self._cached.remove(block_id)
            self.num_found_again += 1
        self._refs[block_id] += 1

    def refresh(self, block_id: int) -> None:
        """Make a cached block the last to be evicted; nothing happens to one in use."""
        if block_id in self._cached:
            self._cached.refresh(block_id)

    def free(self, block_ids: Iterable[int]) -> int:
        """Give one reference of each block back, in this order; returns how many became free. Skips null blocks."""
        num_freed = 0
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            refs = self._refs[block_id] - 1
            assert refs >= 0, f"block {block_id} freed twice"
            self._refs[block_id] = refs
            if refs == 0:
                num_freed += 1
                if block_id in self.index:
                    self._cached.add(block_id, self.index.entry_of(block_id)[1])
                else:
                    self._clean.append(block_id)
        return num_freed

    def publish(self, block_id: int, key: bytes, namespace: bytes, weight: float = 1.0) -> None:
        """Make an active block of a tenant of `weight` findable. A second with the same contents stays private."""
        assert self._refs[block_id] > 0, f"free block {block_id} published"
        if block_id not in self.index:
            self.index.put(key, block_id, namespace)
            self._cached.weigh(namespace, weight)

    def forget(self, namespace: bytes | None) -> int:
        """Unpublish a namespace's blocks (None: all); returns how many. Free ones become clean."""
        block_ids = self.index.blocks_in(namespace)
        for block_id in block_ids:
            self.index.remove(block_id)
            if self._refs[block_id] == 0:
                self._cached.remove(block_id)
                self._clean.append(block_id)
        return len(block_ids)

    def check(self, expected_refs: dict[int, int]) -> None:
        """Raises AssertionError unless references equal `expected_refs` and every block is in exactly one place."""
        self.index.check()
        clean = set(self._clean)
        assert len(clean) == len(self._clean), "a block is clean twice"
        assert not clean & set(self._cached), "a block is clean and cached"
        assert NULL_BLOCK not in clean and NULL_BLOCK not in self._cached
        assert self._refs[NULL_BLOCK] == 0
        for block_id in range(1, self.num_blocks + 1):
            refs = self._refs[block_id]
            assert refs == expected_refs.get(block_id, 0), (
                f"block {block_id}: {refs} references, tables have {expected_refs.get(block_id, 0)}"
            )
            is_free = block_id in clean or block_id in self._cached
            assert is_free == (refs == 0), f"block {block_id}: {refs} references, free: {is_free}"
            assert not (block_id in clean and block_id in self.index), f"clean block {block_id} is published"
        for block_id in self._cached:
            assert block_id in self.index, f"cached block {block_id} is not published"
