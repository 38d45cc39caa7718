"""Free blocks that still hold published contents, and which of them is given up next: each tenant has its share.

    tenant a   [ old ............ new ]      over its share: its least recently used goes
    tenant b   [ old .. new ]                within its share: kept, even if it is the oldest of all

A share is the tenant's weight over those of all tenants with cached blocks, of all cached blocks. What a tenant does
not use of its share others may, until it comes back. With one tenant this is plain LRU. All but `pop` are O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

TENANT_BYTES = 16
"""Of a namespace: what follows narrows it within its tenant."""


class CachedBlocks:
    """Block ids, least recently used first, each under the tenant of its namespace."""

    def __init__(self) -> None:
        self._owner: OrderedDict[int, bytes] = OrderedDict()
        self._of: dict[bytes, OrderedDict[int, None]] = {}
        self._weights: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def __iter__(self) -> Iterator[int]:
        return iter(self._owner)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._owner

    def weigh(self, namespace: bytes, weight: float) -> None:
        self._weights[namespace[:TENANT_BYTES]] = weight

    def add(self, block_id: int, namespace: bytes) -> None:
        """As the most recently used."""
        owner = self._owner[block_id] = namespace[:TENANT_BYTES]
        self._of.setdefault(owner, OrderedDict())[block_id] = None

    def remove(self, block_id: int) -> None:
        owner = self._owner.pop(block_id)
        blocks = self._of[owner]
        del blocks[block_id]
        if not blocks:
            del self._of[owner]

    def refresh(self, block_id: int) -> None:
        """It is the most recently used now."""
        self._owner.move_to_end(block_id)
        self._of[self._owner[block_id]].move_to_end(block_id)

    def pop(self) -> int:
        """The oldest block whose tenant is over its share; O(tenants) where there are several."""
        block_id, owner = next(iter(self._owner.items()))
        if len(self._of) > 1:
            total = sum(map(self._weight, self._of))
            if len(self._of[owner]) * total <= len(self._owner) * self._weight(owner):
                owner = max(self._of, key=lambda o: len(self._of[o]) / self._weight(o))
                block_id = next(iter(self._of[owner]))
        self.remove(block_id)
        return block_id

    def _weight(self, owner: bytes) -> float:
        return self._weights.get(owner, 1.0)
