"""Answers of /v1/responses kept for a while, so that a client may go on from one by its id. In memory, bounded.

Each tenant has its own shelf: what one keeps displaces nothing of another's, and an id of another's is not found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from steelyard.errors import NotFound
from steelyard.server.protocol import Message

TTL_S = 3600
MAX_KEPT = 1024
MAX_KEPT_BYTES = 64 * 2**20
"""Of one tenant. Beyond either its oldest goes; an answer larger than all of it is not kept."""


class ResponseNotFound(NotFound):
    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class Kept:
    """`turns`: the conversation up to and with the answer, without instructions; `answer`: the response's JSON."""

    turns: tuple[Message, ...]
    answer: bytes
    num_bytes: int
    until_ns: int


class ResponseStore:
    """All tenants' shelves."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._shelves: dict[str, OrderedDict[str, Kept]] = {}

    def keep(self, tenant: str, id: str, turns: Sequence[Message], answer: dict[str, Any]) -> None:
        raw = msgspec.json.encode(answer)
        num_bytes = len(raw) + len(msgspec.json.encode(turns))
        shelf = self._shelf(tenant)
        shelf[id] = Kept(tuple(turns), raw, num_bytes, self._clock_ns() + TTL_S * 10**9)
        total_bytes = sum(kept.num_bytes for kept in shelf.values())
        while len(shelf) > MAX_KEPT or total_bytes > MAX_KEPT_BYTES:
            total_bytes -= shelf.popitem(last=False)[1].num_bytes

    def get(self, tenant: str, id: str, param: str | None = None) -> Kept:
        """Raises ResponseNotFound: never kept, too old, displaced, or another tenant's."""
        kept = self._shelf(tenant).get(id)
        if kept is None:
            raise ResponseNotFound(
                f"response {id[:80]!r} is not kept: answers stay in the memory of the process that gave them for "
                f"{TTL_S} s, at most the last {MAX_KEPT}, and only if they were not sent with store false; "
                "send the whole conversation as input",
                param=param,
            )
        return kept

    def delete(self, tenant: str, id: str) -> None:
        """Raises ResponseNotFound."""
        self.get(tenant, id)
        del self._shelves[tenant][id]

    def forget(self, tenant: str) -> None:
        """All of a tenant's: it has lost a key."""
        self._shelves.pop(tenant, None)

    def _shelf(self, tenant: str) -> OrderedDict[str, Kept]:
        """A tenant's answers that are not too old, oldest first."""
        shelf = self._shelves.setdefault(tenant, OrderedDict())
        now_ns = self._clock_ns()
        while shelf and next(iter(shelf.values())).until_ns <= now_ns:
            shelf.popitem(last=False)
        return shelf
