"""Which blocks hold what a request needs, on the device or in the host tier. Reads the pools; takes nothing.

Found tables have a block id where the device has the block, minus a slot where only the host has it, 0 behind a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from steelyard.cache.blocks import NULL_BLOCK, BlockPool
from steelyard.cache.host import Away, HostTier
from steelyard.core.step import KvGroup


class Lookup:
    """Over the pools of all KV groups and the host tier behind them.

    kept  of each group, the first blocks of a table that stay visible behind its window
    """

    def __init__(self, pools: Sequence[BlockPool], host: HostTier, groups: Sequence[KvGroup], block_size: int) -> None:
        self._pools = pools
        self._host = host
        self._windows = tuple(group.window for group in groups)
        self._block_size = block_size
        self.kept = tuple(-(-group.keep_first // block_size) for group in groups)

    def fates(self) -> list[tuple[int, int]]:
        """Of each group's cached blocks so far: how many were found again, and how many evicted unused."""
        return [(pool.num_found_again, pool.num_evicted) for pool in self._pools]

    def first_visible(self, group: int, position: int) -> int:
        """Index of the first block, behind the kept ones, that a query at `position` or later can see in `group`."""
        window = self._windows[group]
        return 0 if window is None else max(max(0, position - window + 1) // self._block_size, self.kept[group])

    def least_blocks(self, num_tokens: int, at_once: bool) -> list[int]:
        """Of each group, the blocks without which so many positions cannot be computed: in the smallest chunks, or with
        none given back behind a window.
        """
        whole, size = -(-num_tokens // self._block_size), self._block_size
        return [
            whole if window is None or at_once else min(whole, kept + -(-(window - 1) // size) + 1)
            for window, kept in zip(self._windows, self.kept)
        ]

    def cut(self, group: int, table: Sequence[int], first: int) -> list[int]:
        """`table` with null blocks for what lies between the kept blocks and index `first`."""
        kept = self.kept[group]
        return [b if i < kept or i >= first else NULL_BLOCK for i, b in enumerate(table)]

    def longest(self, keys: list[bytes], from_host: bool) -> int:
        """How many leading blocks of these keys are all that a query behind them needs."""
        num_hits = len(keys)
        for group, window in enumerate(self._windows):
            if window is None:
                get = self._getter(group, from_host)
                num_hits = next((i for i in range(num_hits) if get(keys[i]) is None), num_hits)
        groups = [g for g, window in enumerate(self._windows) if window is not None]
        while num_hits and not all(self._window_is_cached(g, keys, num_hits, from_host) for g in groups):
            num_hits -= 1
        return num_hits

    def keep(self, keys: list[bytes]) -> None:
        """Make the cached blocks of a chain the last to be evicted, its beginning the very last."""
        for pool in self._pools:
            found = (pool.index.get(key) for key in reversed(keys))
            for block_id in found:
                if block_id is not None:
                    pool.refresh(block_id)

    def tables(self, keys: list[bytes]) -> list[list[int]]:
        """The tables of a hit of all these keys."""
        num_hits = len(keys)
        tables: list[list[int]] = []
        for group in range(len(self._pools)):
            first, get = self.first_visible(group, num_hits * self._block_size), self._getter(group, from_host=True)
            seen = self.cut(group, range(1, num_hits + 1), first)
            found = [get(key) if i else NULL_BLOCK for i, key in zip(seen, keys)]
            tables.append([b for b in found if b is not None])
            assert len(tables[-1]) == num_hits, "the match has gone"
        return tables

    def away_tables(self, away: Away, keys: list[bytes]) -> list[list[int]]:
        """The tables of a swapped request whose first blocks have `keys`: what the device still has is not copied."""
        tables: list[list[int]] = []
        for pool, slots in zip(self._pools, away.tables):
            here = [pool.index.get(key) if slot else None for key, slot in zip(keys, slots)]
            here += [None] * (len(slots) - len(here))
            tables.append([-slot if b is None else b for b, slot in zip(here, slots)])
        return tables

    def _getter(self, group: int, from_host: bool) -> Callable[[bytes], int | None]:
        get, host = self._pools[group].index.get, self._host
        if not from_host:
            return get

        def either(key: bytes) -> int | None:
            found = get(key)
            if found is None and (slot := host.get(group, key)) is not None:
                return -slot
            return found

        return either

    def _window_is_cached(self, group: int, keys: list[bytes], num_hits: int, from_host: bool) -> bool:
        first = self.first_visible(group, num_hits * self._block_size)
        get = self._getter(group, from_host)
        needed = keys[: min(self.kept[group], num_hits)] + keys[first:num_hits]
        return all(get(key) is not None for key in needed)
