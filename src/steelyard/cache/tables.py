"""What a request holds in the pools, and the pools' blocks by use: plain records of the manager."""

from __future__ import annotations

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
    """A request's tables. `first_live[g]`: entries before it are null. `num_published`: full blocks already seen."""

    __slots__ = ("first_live", "num_published", "publishes", "tables")

    def __init__(self, tables: list[list[int]], num_published: int) -> None:
        self.tables = tables
        self.first_live = [next((i for i, b in enumerate(t) if b != NULL_BLOCK), len(t)) for t in tables]
        self.num_published = num_published
        self.publishes = True
