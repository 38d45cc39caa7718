"""One request's blocks: match, grow, fork, commit, slide, swap, release. All-or-nothing; decides for nobody.

    positions  0 ........ B ........ 2B ....... 3B
    table g    [ block 7 ][ block 3 ][ block 9 ]          one table per KV group (layers that share a window)
                 shared     shared     private, partly filled: the only kind a request writes to

Calls return table edits for the runner, or None with nothing changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from steelyard.cache.blocks import NULL_BLOCK, BlockPool
from steelyard.cache.contiguous import ContiguousPool, Reserve
from steelyard.cache.host import HostTier
from steelyard.cache.lookup import Lookup
from steelyard.cache.tables import CacheUsage, Tables
from steelyard.core.hashing import block_hash, root_hash
from steelyard.core.request import Request
from steelyard.core.step import Copy, RunnerCaps, TableEdit


class CacheManager:
    """Block tables of all resident requests, and the pools behind them."""

    def __init__(self, caps: RunnerCaps, enable_prefix_caching: bool = True, reserve: Reserve | None = None) -> None:
        """`reserve`: positions that a request gets at once and in one run of blocks; None: blocks as it grows."""
        assert reserve is None or not enable_prefix_caching, "blocks of one run cannot be shared"
        self.block_size = caps.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._caps = caps
        self._windows = tuple(group.window for group in caps.groups)
        self._reserve = reserve
        self._pools = [BlockPool(num) if reserve is None else ContiguousPool(num) for num in caps.num_blocks]
        self._sequences: dict[Request, Tables] = {}
        self.num_releases = 0  # grows whenever a block may have become free
        self.has_windows = any(window is not None for window in self._windows)
        self.host = HostTier(caps.num_host_blocks or (0,) * len(caps.groups))
        self._lookup = Lookup(self._pools, self.host, caps.groups, self.block_size)
        self.keep = self._lookup.keep
        self.fates = self._lookup.fates
        self._first_visible = self._lookup.first_visible
        for group, pool in enumerate(self._pools if caps.num_host_blocks else []):
            pool.on_evict = partial(self.host.demote, group)

    @property
    def reserves(self) -> bool:
        """Whether a request takes all its blocks when it is admitted."""
        return self._reserve is not None

    # lookup

    def match(self, request: Request, *, from_host: bool = False) -> int:
        """Tokens of `request` whose KV is cached: a multiple of the block size, at most len(tokens) - 1.

        A hit of L tokens needs every block below L in full groups, and in window groups those that the query at
        position L can see. A request that wants something of every prompt position (log-probabilities, their mean)
        matches nothing: it must compute them. `from_host` counts blocks of the host tier too; `grow` has them copied.
        """
        if not self.enable_prefix_caching or request.wants_every_position:
            return 0
        hashes = self._hashes(request, (len(request.tokens) - 1) // self.block_size)
        return self._lookup.longest(hashes, from_host) * self.block_size

    def ever_fits(self, num_tokens: int, at_once: bool = False) -> bool:
        """Whether one request alone could have KV for `num_tokens` positions. `at_once`: with no block given back."""
        needs = self._lookup.least_blocks(num_tokens, at_once or self.reserves)
        return all(need <= pool.num_blocks for need, pool in zip(needs, self._pools))

    def capacity_tokens(self, at_once: bool = False) -> int:
        """The most positions that ever fit, at most the model's context length."""
        longest = self._caps.max_model_len
        sizes = (longest, *(pool.num_blocks * self.block_size for pool in self._pools))
        return max(n for n in sizes if n <= longest and self.ever_fits(n, at_once))

    def room(self, request: Request) -> int:
        """Positions for which `request` holds blocks now."""
        return min(len(table) for table in self._sequences[request].tables) * self.block_size

    def reach(self, request: Request) -> int:
        """Positions `request` could hold if it took every free block."""
        sequence = self._sequences.get(request)
        lens = [0] * len(self._pools) if sequence is None else [len(t) for t in sequence.tables]
        return min(n + pool.num_free for n, pool in zip(lens, self._pools)) * self.block_size

    def free_blocks(self) -> int:
        """Blocks that can be taken now, in the scarcest group."""
        return min(pool.num_free for pool in self._pools)

    def smallest_pool(self) -> int:
        """Blocks of the smallest group's pool."""
        return min(pool.num_blocks for pool in self._pools)

    # growth

    def grow(
        self,
        request: Request,
        num_tokens: int,
        *,
        hit_tokens: int = 0,
        reserve_len: int = 0,
        spare_blocks: int = 0,
    ) -> list[TableEdit] | None:
        """Give `request` blocks for positions [0, num_tokens): edits for its row, if it has one; None: nothing changed.

        hit_tokens    what `match` just found, for a request without a table: those blocks are shared; what the host
                      alone has of them is copied back. A swapped request gets its own blocks back instead
        reserve_len   full groups get blocks for this many positions if it is more
        spare_blocks  blocks that must stay free in every group
        """
        sequence = self._sequences.get(request)
        assert sequence is None or not hit_tokens, "a request with a table has had its match"
        tables = self._found(request, hit_tokens) if sequence is None else sequence.tables
        counts: list[int] = []
        for pool, window, table in zip(self._pools, self._windows, tables):
            target = num_tokens if window is not None else max(num_tokens, reserve_len)
            if self._reserve is not None:
                target = max(num_tokens, self._reserve(request))
            count = max(0, -(-target // self.block_size) - len(table))
            idle = 0 if sequence is not None else sum(b < 0 or (b > 0 and not pool.refs(b)) for b in table)
            if (count or idle) and not pool.fits(count + idle, spare_blocks):
                return None
            counts.append(count)
        first = [0] * len(tables) if sequence is None else [len(t) for t in tables]
        if sequence is None:
            self._sequences[request] = self._hold(request, tables, hit_tokens)
        for pool, table, count in zip(self._pools, tables, counts):
            table += pool.take(count)
        return self._edits(request.row, tables, first)

    def _hold(self, request: Request, tables: list[list[int]], hit_tokens: int) -> Tables:
        """Reference the blocks of `tables`, and have those that only the host has copied into blocks of its own."""
        for group, (pool, table) in enumerate(zip(self._pools, tables)):
            for block_id in table:
                if block_id > 0:
                    pool.touch(block_id)
                elif block_id < 0:
                    self.host.hold(group, -block_id)
        num_published = hit_tokens // self.block_size
        for group, (pool, table) in enumerate(zip(self._pools, tables)):
            for i, block_id in enumerate(table):
                if block_id < 0:
                    [table[i]] = pool.take(1)
                    self.host.fetch(group, -block_id, table[i])
                    num_published = min(num_published, i)
        sequence = Tables(tables, num_published, self._lookup.kept)
        away = self.host.away(request)
        if away is not None:
            sequence.publishes, sequence.num_published = away.publishes, 0
            self.host.release(request)
        return sequence

    def can_fork(self, parent: Request, at: int) -> bool:
        """Whether `parent` still holds the blocks a sequence of `at` positions needs."""
        sequence = self._sequences.get(parent)
        if sequence is None or parent.num_computed < at or self._reserve is not None:
            return False
        return all(
            len(table) * self.block_size >= at and live <= self._first_visible(g, at)
            for g, (table, live) in enumerate(zip(sequence.tables, sequence.first_live))
        )

    def fork(self, parent: Request, child: Request, at: int) -> list[Copy] | None:
        """Give `child` the first `at` positions of `parent`: full blocks shared, one partial block copied.

        None with nothing changed if a pool has no block left for the copy.
        """
        assert child not in self._sequences and self.can_fork(parent, at)
        num_full, partial = divmod(at, self.block_size)
        if partial and any(not pool.num_free for pool in self._pools):
            return None
        copies: list[Copy] = []
        tables: list[list[int]] = []
        for g, (pool, source) in enumerate(zip(self._pools, self._sequences[parent].tables)):
            table = self._lookup.cut(g, source[:num_full], self._first_visible(g, at))
            for block_id in filter(None, table):
                pool.touch(block_id)
            if partial:
                [own] = pool.take(1)
                copies.append(Copy(g, source[num_full], own))
                table.append(own)
            tables.append(table)
        self._sequences[child] = Tables(tables, num_full, self._lookup.kept)
        return copies

    # progress

    def commit(self, request: Request, num_tokens: int) -> None:
        """Publish the full blocks of positions [0, num_tokens), all of them computed and never rolled back."""
        sequence = self._sequences[request]
        num_full = num_tokens // self.block_size
        if not self.enable_prefix_caching or not sequence.publishes or num_full <= sequence.num_published:
            return
        hashes = self._hashes(request, num_full)
        for i in range(sequence.num_published, num_full):
            for pool, table in zip(self._pools, sequence.tables):
                if table[i] != NULL_BLOCK:
                    pool.publish(table[i], hashes[i], request.namespace, request.weight)
        sequence.num_published = num_full

    def slide(self, request: Request, committed_len: int) -> list[TableEdit]:
        """Free blocks that no query at position `committed_len` or later can see. Call after `commit`."""
        sequence = self._sequences[request]
        edits: list[TableEdit] = []
        for g, table in enumerate(sequence.tables):
            first, dead = sequence.first_live[g], min(self._first_visible(g, committed_len), len(table))
            if dead > first:
                self._pools[g].free(table[first:dead])
                self.num_releases += 1
                table[first:dead] = [NULL_BLOCK] * (dead - first)
                sequence.first_live[g] = dead
                edits.append(TableEdit(g, request.row, first, (NULL_BLOCK,) * (dead - first)))
        return edits

    def swap_out(self, request: Request) -> bool:
        """Have the KV of `request` copied to the host, give its blocks back. False, nothing changed, without room."""
        if not request.num_computed:
            return False
        sequence, num_blocks = self._sequences[request], -(-request.num_computed // self.block_size)
        keys = self._keys(request, request.num_computed, sequence.publishes)
        tables = [table[:num_blocks] for table in sequence.tables]
        if not self.host.swap_out(request, tables, keys, sequence.publishes):
            return False
        self._free(request)
        return True

    def swapped_tokens(self, request: Request) -> int:
        """Positions whose KV the host keeps for a swapped request; else 0."""
        away = self.host.away(request)
        return 0 if away is None else away.num_tokens

    def release(self, request: Request) -> int:
        """Give all blocks back, last first, so that a chain's end is evicted before its start, and what the host keeps.
        Idempotent.

        Returns how many blocks became free.
        """
        self.host.release(request)
        return self._free(request)

    def _free(self, request: Request) -> int:
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return 0
        self.num_releases += 1
        return sum(pool.free(reversed(table)) for pool, table in zip(self._pools, sequence.tables))

    def drop(self, namespace: bytes | None = None) -> int:
        """Forget the cached KV of a namespace and those below it (None: of all), on the device and on the host.

        Requests that run or are swapped keep their blocks and publish nothing any more. Returns the blocks forgotten.
        """
        for request, sequence in self._sequences.items():
            if namespace is None or request.namespace.startswith(namespace):
                sequence.publishes = False
        return sum(pool.forget(namespace) for pool in self._pools) + self.host.drop(namespace)

    # accounts

    def usage(self) -> CacheUsage:
        total = sum(p.num_blocks for p in self._pools)
        clean, cached = sum(p.num_clean for p in self._pools), sum(p.num_cached for p in self._pools)
        slack = sum(
            max(0, len(table) * self.block_size - request.num_computed)
            for request, sequence in self._sequences.items()
            for table in sequence.tables
        )
        return CacheUsage(total, clean + cached, clean, cached, total - clean - cached, slack)

    def largest_run(self) -> int:
        """The most blocks one request could take now, in the scarcest group."""
        return min(pool.largest_run for pool in self._pools)

    def most_active(self) -> int:
        """The most blocks that requests ever held, all groups together."""
        return sum(pool.most_active for pool in self._pools)

    def num_fragmented(self) -> int:
        """How often a request did not get blocks although enough were free, none in one run."""
        return sum(pool.num_fragmented for pool in self._pools)

    def pools(self) -> list[tuple[int, int, int]]:
        """(blocks, clean, cached) of each group."""
        return [(p.num_blocks, p.num_clean, p.num_cached) for p in self._pools]

    def cached_ids(self, group: int) -> list[int]:
        """Free blocks that still hold published contents, least recently used first."""
        return self._pools[group].cached_ids()

    def has_twin(self, group: int, block_id: int, key: bytes) -> bool:
        """Whether another block offers the contents `key` that `block_id` holds."""
        return self._pools[group].index.get(key) not in (None, block_id)

    def tables(self, request: Request) -> Sequence[Sequence[int]]:
        """The block tables of `request`, one per group; empty if it holds none. Not to be changed."""
        sequence = self._sequences.get(request)
        return () if sequence is None else sequence.tables

    def may_write(self, request: Request, start: int, end: int) -> bool:
        """Whether `request` alone references every block of positions [start, end)."""
        first, last = start // self.block_size, -(-end // self.block_size)
        return all(
            len(table) >= last and all(b != NULL_BLOCK and pool.refs(b) == 1 for b in table[first:last])
            for pool, table in zip(self._pools, self._sequences[request].tables)
        )

    def check(self) -> None:
        """Raises AssertionError if references, tables and published keys do not agree."""
        self.host.check()
        for g, pool in enumerate(self._pools):
            refs: Counter[int] = Counter()
            for request, sequence in self._sequences.items():
                table, live, kept = sequence.tables[g], sequence.first_live[g], self._lookup.kept[g]
                held = [*table[:kept], *table[live:]]
                assert all(b == NULL_BLOCK for b in table[kept:live]), f"{request}: a block behind the window"
                assert all(0 < b <= pool.num_blocks for b in held), f"{request}: a hole in the table"
                refs.update(held)
                for block_id, key in zip(table, request.block_hashes):
                    published = pool.index.key_of(block_id)
                    assert published in (None, key), f"{request}: block {block_id} is published with another key"
            pool.check(refs)

    # inside

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Keys of the first `num_blocks` full blocks, computing those not yet known."""
        known, size, caps = request.block_hashes, self.block_size, self._caps
        while len(known) < num_blocks:
            parent = known[-1] if known else root_hash(caps.fingerprint, caps.kv_layout, request.namespace)
            known.append(block_hash(parent, request.tokens[len(known) * size : (len(known) + 1) * size]))
        return known[:num_blocks]

    def _found(self, request: Request, hit_tokens: int) -> list[list[int]]:
        """Tables of what `match` found, or of what a swapped request had (see cache/lookup.py)."""
        away = self.host.away(request)
        if away is not None:
            return self._lookup.away_tables(away, self._keys(request, away.num_tokens, away.publishes))
        return self._lookup.tables(request.block_hashes[: hit_tokens // self.block_size])

    def _keys(self, request: Request, num_tokens: int, publishes: bool) -> list[bytes]:
        """Keys of the full blocks of computed positions; none where nothing may be shared."""
        return self._hashes(request, num_tokens // self.block_size) if self.enable_prefix_caching and publishes else []

    @staticmethod
    def _edits(row: int, tables: list[list[int]], first: list[int]) -> list[TableEdit]:
        return [TableEdit(g, row, f, tuple(t[f:])) for g, (t, f) in enumerate(zip(tables, first)) if len(t) > f]
