"""Where the device's memory is, in bytes that sum to its total, and the KV pool again by what its blocks hold.

total   = context + weights + KV pool + activation peak + graphs + communication + slack + free + unaccounted
KV pool = null block + clean + cached + active filled + active slack + swapping
slack   = tail of last blocks + blocks reserved ahead
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from steelyard.core.step import MemoryTerms

MAX_UNACCOUNTED = 0.02
"""Of the total: more than that means a term is missing."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """One KV group's blocks; clean + cached + active = num_blocks. Slots are of active blocks, each block once.

    filled_slots      hold KV that is valid
    tail_slots        empty, in blocks that hold something
    reserved_slots    empty, in blocks that hold nothing yet
    shared_blocks     active blocks that more than one request uses
    duplicate_blocks  active blocks whose contents another block already offers
    """

    num_blocks: int
    clean: int
    cached: int
    active: int
    filled_slots: int
    tail_slots: int
    reserved_slots: int
    shared_blocks: int
    duplicate_blocks: int

    def check(self, block_size: int) -> None:
        """Raises AssertionError unless blocks partition the pool and slots the active blocks."""
        assert self.clean + self.cached + self.active == self.num_blocks, f"blocks do not partition the pool: {self}"
        slots = self.filled_slots + self.tail_slots + self.reserved_slots
        assert slots == self.active * block_size, f"slots do not partition the active blocks: {self}"


@dataclass(frozen=True, slots=True)
class Holding:
    """A request's blocks in one group: its table (0: behind the window) and how many positions have valid KV."""

    table: Sequence[int]
    num_computed: int
    keys_known_elsewhere: Sequence[bool] = ()


def pool_use(num_blocks: int, clean: int, cached: int, block_size: int, holdings: Iterable[Holding]) -> PoolUse:
    """Count each active block once, filled as far as whichever holder has filled it most."""
    filled: dict[int, int] = {}
    holders: dict[int, int] = {}
    duplicates: set[int] = set()
    for holding in holdings:
        for i, block_id in enumerate(holding.table):
            if block_id:
                valid = min(max(holding.num_computed - i * block_size, 0), block_size)
                filled[block_id] = max(filled.get(block_id, 0), valid)
                holders[block_id] = holders.get(block_id, 0) + 1
        duplicates |= {b for b, elsewhere in zip(holding.table, holding.keys_known_elsewhere) if b and elsewhere}
    some = [valid for valid in filled.values() if valid]
    return PoolUse(
        num_blocks=num_blocks,
        clean=clean,
        cached=cached,
        active=num_blocks - clean - cached,
        filled_slots=sum(some),
        tail_slots=len(some) * block_size - sum(some),
        reserved_slots=(len(filled) - len(some)) * block_size,
        shared_blocks=sum(1 for count in holders.values() if count > 1),
        duplicate_blocks=len(duplicates),
    )


def cached_fates(found_again: int, evicted: int) -> dict[str, int | float | None]:
    """What became of blocks that were kept for their contents; the dead are those that nobody came back for.

    `dead_share` is of all whose fate is known, so what to expect of those cached now; None before the first.
    """
    known = found_again + evicted
    return {"found_again": found_again, "evicted": evicted, "dead_share": evicted / known if known else None}


def pool_bytes(use: PoolUse, block_size: int, block_bytes: int) -> dict[str, int]:
    """The pool's bytes by what they hold; they sum to (num_blocks + 1) * block_bytes."""
    active_bytes = use.active * block_bytes
    filled_bytes = use.filled_slots * block_bytes // block_size
    tail_bytes = use.tail_slots * block_bytes // block_size
    return {
        "null_block": block_bytes,
        "clean": use.clean * block_bytes,
        "cached": use.cached * block_bytes,
        "active_filled": filled_bytes,
        "active_tail": tail_bytes,
        "active_reserved": active_bytes - filled_bytes - tail_bytes,
        "swapping": 0,
    }


def device_bytes(terms: MemoryTerms) -> dict[str, int]:
    """Every term by name, `unaccounted` last; without the total they sum to it."""
    named = {name.removesuffix("_bytes"): value for name, value in asdict(terms).items()}
    total = named.pop("total")
    return {**named, "unaccounted": total - sum(named.values()), "total": total}


def unaccounted_share(terms: MemoryTerms) -> float:
    """Of the total, the part that is in no term; negative where terms overlap; 0 where there is no device."""
    named = device_bytes(terms)
    return named["unaccounted"] / named["total"] if named["total"] else 0.0


def is_accounted_for(terms: MemoryTerms) -> bool:
    """Whether the terms miss the total by no more than MAX_UNACCOUNTED of it, either way."""
    return abs(unaccounted_share(terms)) <= MAX_UNACCOUNTED


def start_table(terms: MemoryTerms, start_seconds: Mapping[str, float]) -> list[str]:
    """The device's bytes with their shares, the seconds of each phase of the start beside them, sums at the end.

    The two halves of a line have nothing to do with each other: a rule parts them, and the headings say what each is.
    """
    named = device_bytes(terms)
    total = max(named["total"], 1)
    left = [f"{name:18} {value:>18,} bytes {value / total:7.2%}" for name, value in named.items() if name != "total"]
    right = [f"{seconds:8.2f} s  {name}" for name, seconds in start_seconds.items()]
    num_lines = max(len(left), len(right))
    lines = zip(left + [""] * (num_lines - len(left)), right + [""] * (num_lines - len(right)))
    sums = f"{'total':18} {named['total']:>18,} bytes {1:7.2%}", f"{sum(start_seconds.values()):8.2f} s  in all"
    headings = f"{'held by':18} {'memory':>18}       {'share':>7}", f"{'time':>8}    phase of the start"
    return [f"{memory:53} |{start}".rstrip() for memory, start in [headings, *lines, sums]]
