"""Contiguous allocation, as a baseline: a request's KV is reserved in one run of blocks when it is admitted.

    first fit   [ A A A A A ][ . . ][ C C C ][ . . . ]      a request of 4 blocks waits although 5 are free

What is reserved and not yet written is internal waste, a hole too short for the next request external fragmentation
(the two that paging removes: Kwon et al., 2023, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from steelyard.cache.blocks import NULL_BLOCK, BlockPool
from steelyard.core.request import Request

Reserve = Callable[[Request], int]
"""Positions reserved for a request when it is admitted."""


def whole_request(request: Request) -> int:
    """Prompt and all output that may come; the last token is never an input."""
    return request.prompt_len + request.max_tokens - 1


def whole_context(max_model_len: int) -> Reserve:
    """As much as any request could take, whatever this one asks for."""
    return lambda request: max_model_len


class ContiguousPool(BlockPool):
    """Blocks handed out in runs, the first hole that is long enough. Nothing is published, so nothing is cached."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._used = bytearray(b"\1" + bytes(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks in all holes together."""
        return self._used.count(0)

    @property
    def num_clean(self) -> int:
        return self.num_free

    @property
    def largest_run(self) -> int:
        """Blocks of the longest hole."""
        return max(map(len, self._used.split(b"\1")))

    def fits(self, count: int, spare: int = 0) -> bool:
        """Whether one hole holds `count` blocks, and `spare` stay free elsewhere."""
        if count + spare > self.num_free:
            return False
        found = self._used.find(bytes(count)) >= 0
        self.num_fragmented += not found
        return found

    def take(self, count: int) -> list[int]:
        """A run of `count` blocks with one reference each. The caller has seen that it is there."""
        if not count:
            return []
        first = self._used.find(bytes(count))
        assert first > 0, f"no hole of {count} blocks"
        self._used[first : first + count] = b"\1" * count
        taken = list(range(first, first + count))
        for block_id in taken:
            self._refs[block_id] = 1
        self.most_active = max(self.most_active, self.num_blocks - self.num_free)
        return taken

    def free(self, block_ids: Iterable[int]) -> int:
        """Give blocks back; holes that meet are one hole."""
        num_freed = 0
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            assert self._refs[block_id] == 1, f"block {block_id} freed twice"
            self._refs[block_id] = 0
            self._used[block_id] = 0
            num_freed += 1
        return num_freed

    def check(self, expected_refs: dict[int, int]) -> None:
        """Raises AssertionError unless references equal `expected_refs` and used blocks are those referenced."""
        for block_id in range(1, self.num_blocks + 1):
            refs = self._refs[block_id]
            assert refs == expected_refs.get(block_id, 0) <= 1, f"block {block_id}: {refs} references"
            assert self._used[block_id] == refs, f"block {block_id} is used and free"
