"""The host tier: KV blocks kept in host memory, of requests that were swapped out and of prefixes that were evicted.

    device  [ 4 ][ 9 ][ 2 ]  --out-->  host  [ slot 1 ][ slot 2 ][ slot 3 ]
                             <--in--         referenced: a displaced request's KV
                                             cached: prefixes, least recently used go first

Moves are noted here and made by the next plan, every `out` before every `in`. A full block is kept once, by its key.
Decides nothing: who is swapped, and whether a copy is worth its time, is the scheduler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.cache.blocks import NULL_BLOCK, BlockPool
from steelyard.core.request import Request
from steelyard.core.step import Swap


@dataclass(frozen=True, slots=True)
class HostUsage:
    """Slots of a group or of all: total = clean + cached + swapped (of displaced requests, or being read)."""

    total: int = 0
    clean: int = 0
    cached: int = 0
    swapped: int = 0


@dataclass(slots=True)
class Away:
    """A swapped request: its slots in place of block ids, the positions they hold, and whether it may publish."""

    tables: list[list[int]]
    num_tokens: int
    publishes: bool


class HostTier:
    """Slots 1 .. num_slots[g] of each KV group. `num_out` and `num_in` count the blocks that plans moved."""

    def __init__(self, num_slots: Sequence[int]) -> None:
        self.num_slots = sum(num_slots)
        self._pools = [BlockPool(num) for num in num_slots]
        self._away: dict[Request, Away] = {}
        self._outs: list[dict[int, int]] = [{} for _ in num_slots]  # slot -> device block
        self._ins: list[Swap] = []
        self.num_out = 0
        self.num_in = 0

    # prefixes

    def get(self, group: int, key: bytes) -> int | None:
        """The slot that holds `key`, or None."""
        return self._pools[group].index.get(key)

    def demote(self, group: int, block_id: int, key: bytes, namespace: bytes) -> None:
        """A cached block is about to be evicted from the device: keep it here, if there is room."""
        pool = self._pools[group]
        slot = pool.index.get(key)
        if slot is not None:
            pool.touch(slot)
        elif not pool.num_free:
            return
        else:
            slot = self._take(group, block_id)
            pool.publish(slot, key, namespace)
        pool.free([slot])

    # displaced requests

    def away(self, request: Request) -> Away | None:
        """What is kept of a swapped request, or None."""
        return self._away.get(request)

    def swap_out(self, request: Request, tables: list[list[int]], keys: Sequence[bytes], publishes: bool) -> bool:
        """Keep the blocks of `tables`, whose first ones have `keys`. False with nothing changed if they do not fit."""
        assert request not in self._away, f"{request} is swapped already"
        found = [
            [pool.index.get(keys[i]) if block and i < len(keys) else None for i, block in enumerate(table)]
            for pool, table in zip(self._pools, tables)
        ]
        for pool, slots in zip(self._pools, found):
            for slot in slots:
                if slot is not None:
                    pool.touch(slot)
        lacking = [sum(b != NULL_BLOCK and s is None for b, s in zip(t, slots)) for t, slots in zip(tables, found)]
        if any(count > pool.num_free for count, pool in zip(lacking, self._pools)):
            for pool, slots in zip(self._pools, found):
                pool.free(slot for slot in slots if slot is not None)
            return False
        held: list[list[int]] = []
        for group, (pool, table, slots) in enumerate(zip(self._pools, tables, found)):
            held.append([])
            for i, (block_id, slot) in enumerate(zip(table, slots)):
                if block_id != NULL_BLOCK and slot is None:
                    slot = self._take(group, block_id)
                    if i < len(keys):
                        pool.publish(slot, keys[i], request.namespace)
                held[-1].append(slot or NULL_BLOCK)
        self._away[request] = Away(held, request.num_computed, publishes)
        return True

    def release(self, request: Request) -> None:
        """A swapped request has ended or is back: its slots are given up. Idempotent."""
        away = self._away.pop(request, None)
        if away is not None:
            for pool, table in zip(self._pools, away.tables):
                pool.free(reversed(table))

    # moves

    def hold(self, group: int, slot: int) -> None:
        """`slot` will be read: it is not taken for anything else before the next plan is made."""
        self._pools[group].touch(slot)

    def fetch(self, group: int, slot: int, block_id: int) -> None:
        """Note the copy of a held slot into a device block."""
        self._ins.append(Swap(group, block_id, slot, out=False))

    def take_swaps(self) -> tuple[Swap, ...]:
        """The moves for the plan that is being made: those whose slot is still wanted, out before in."""
        if not self._ins and not any(self._outs):
            return ()
        outs = [
            Swap(group, block_id, slot, out=True)
            for group, (pool, noted) in enumerate(zip(self._pools, self._outs))
            for slot, block_id in noted.items()
            if pool.refs(slot) or slot in pool.index
        ]
        ins, self._ins = self._ins, []
        for noted in self._outs:
            noted.clear()
        for swap in ins:
            self._pools[swap.group].free([swap.host_slot])
        self.num_out += len(outs)
        self.num_in += len(ins)
        return (*outs, *ins)

    # accounts

    def drop(self, namespace: bytes | None) -> int:
        """Forget the prefixes of a namespace and those below it; its swapped requests publish nothing any more."""
        for request, away in self._away.items():
            if namespace is None or request.namespace.startswith(namespace):
                away.publishes = False
        return sum(pool.forget(namespace) for pool in self._pools)

    def usage(self) -> HostUsage:
        """Of all groups together."""
        groups = self.usage_of_groups()
        return HostUsage(*(sum(getattr(use, name) for use in groups) for name in HostUsage.__slots__))

    def usage_of_groups(self) -> list[HostUsage]:
        return [
            HostUsage(p.num_blocks, p.num_clean, p.num_cached, p.num_blocks - p.num_clean - p.num_cached)
            for p in self._pools
        ]

    def check(self) -> None:
        """Raises AssertionError unless references are those of swapped requests and of noted copies."""
        for group, pool in enumerate(self._pools):
            refs = Counter(slot for away in self._away.values() for slot in away.tables[group] if slot != NULL_BLOCK)
            refs.update(swap.host_slot for swap in self._ins if swap.group == group)
            pool.check(refs)

    # inside

    def _take(self, group: int, block_id: int) -> int:
        [slot] = self._pools[group].take(1)
        self._outs[group][slot] = block_id
        return slot
