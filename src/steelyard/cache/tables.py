"""What a request holds in the pools, and the pools' blocks by use: plain records of the manager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.cache.blocks import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks over all groups: total = free + active, free = clean + cached. Slack: allocated slots without KV."""

    total: int
    free: int
    clean: int
    cached: int
    active: int
    slack_tokens: int


class Tables:
    """A request's tables. `first_live[g]`: entries before it are null but for the first kept ones of the group.

    `num_published`: full blocks already seen.
    """

    __slots__ = ("first_live", "num_published", "publishes", "tables")

    def __init__(self, tables: list[list[int]], num_published: int, kept: Sequence[int]) -> None:
        self.tables = tables
        self.first_live = [
            next((i for i in range(first, len(t)) if t[i] != NULL_BLOCK), max(first, len(t)))
            for first, t in zip(kept, tables)
        ]
        self.num_published = num_published
        self.publishes = True
