"""The queue: requests without a row, in policy order, each in the state that says why it waits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from operator import attrgetter

from steelyard.core.request import Request
from steelyard.core.timed import State

_by_key = attrgetter("order_key")
DISPLACED = frozenset({State.PREEMPTED, State.SWAP_OUT, State.SWAPPED})


class WaitingQueue:
    """Sorted by `order_key`. A preempted request goes back to its old place and stays displaced while it waits.

    short       those of at most `short_len` known tokens, in the same order
    tenants     how many requests of each tenant wait; only of those that have some
    """

    def __init__(self, short_len: int) -> None:
        self.items: list[Request] = []
        self.short: list[Request] = []
        self.tenants: Counter[str] = Counter()
        self._short_len = short_len
        self._shared: State | None = None
        self._num_unlabelled = 0

    def __len__(self) -> int:
        return len(self.items)

    def is_short(self, request: Request) -> bool:
        return len(request.tokens) <= self._short_len

    def push(self, request: Request) -> None:
        for items in self._lists_of(request):
            insort(items, request, key=_by_key)
        self.tenants[request.tenant] += 1
        self._num_unlabelled += 1

    def remove(self, request: Request) -> None:
        for items in (self.items, self.short):  # a stop may have cut its tokens since: it can have become short
            at = bisect_left(items, request.order_key, key=_by_key)
            found = at < len(items) and items[at] is request
            assert found or items is self.short, f"{request} does not wait"
            if found:
                del items[at]
        self.tenants[request.tenant] -= 1
        if not self.tenants[request.tenant]:
            del self.tenants[request.tenant]

    def sort(self) -> None:
        """Order keys have changed."""
        self.items.sort(key=_by_key)
        self.short.sort(key=_by_key)

    def label(self, skipped: dict[Request, State], shared: State | None, now_ns: int) -> None:
        """Record why each request waits: `skipped` for private reasons, the others for the `shared` one.

        Costs nothing when the reason is that of the last pass and nobody came.
        """
        if shared is not None and (shared is not self._shared or self._num_unlabelled or skipped):
            for request in self.items:
                self._set(request, skipped.get(request, shared), now_ns)
        elif shared is None:
            for request, reason in skipped.items():
                self._set(request, reason, now_ns)
        self._shared = None if skipped else shared
        self._num_unlabelled = 0

    def by_reason(self) -> dict[str, int]:
        return dict(Counter(request.state.value for request in self.items))

    def _lists_of(self, request: Request) -> tuple[list[Request], ...]:
        return (self.items, self.short) if self.is_short(request) else (self.items,)

    @staticmethod
    def _set(request: Request, reason: State, now_ns: int) -> None:
        if request.state is not reason and request.state not in DISPLACED:
            request.to(reason, now_ns)
