"""Who gives way when blocks lack, and how its KV comes back: computed again, or swapped to the host and copied back.

    victim   over its tenant's share, then of the lowest class, then the least to lose, then the youngest
    how      swap if out and in together cost less than computing again, and the host has room; else recompute

Coefficients are injected; without any, KV is worth its tokens and a swap is taken to be the cheaper way.
"""

from __future__ import annotations

from steelyard.core.request import Request
from steelyard.scheduler.live import Live
from steelyard.scheduler.protocols import Cost, Order
from steelyard.scheduler.rows import Resident


class Preempter:
    """Chooses victims among the running requests, never the anchor, and displaces them."""

    def __init__(self, live: Live, order: Order, cost: Cost | None) -> None:
        self._live = live
        self._order = order
        self._cost = cost

    def victim(self, now_ns: int) -> Resident | None:
        """Whom to preempt: a paused request first, else the last by the key above; never the anchor.

        Requests already in this step's plan have work in flight and are left alone.
        """
        rows = self._live.rows
        anchor = rows.anchor()
        for candidates in (rows.paused, [*rows.decodes, *rows.prefills]):
            free = [r for r in candidates if r.work_in_flight is None and r is not anchor]
            if free:
                return max(free, key=lambda r: self.key(r.request, now_ns))
        return None

    def displace(self, resident: Resident, now_ns: int) -> None:
        """Preempt by the cheaper way; a host without room leaves recomputing."""
        recompute_ns, swap_ns = self._prices_of(resident.request.num_computed)
        self._live.preempt(resident, now_ns, swap=2 * swap_ns < recompute_ns)

    def copies_back(self, num_tokens: int) -> bool:
        """Whether so many tokens of a prefix are copied from the host rather than computed."""
        recompute_ns, swap_ns = self._prices_of(num_tokens)
        return swap_ns < recompute_ns

    def key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        """The running request with the highest goes first."""
        recompute_ns, swap_ns = self._prices_of(request.num_computed)
        can_swap = self._cost is not None and self._live.cache.host.num_slots > 0
        loss = min(recompute_ns, 2 * swap_ns) if can_swap else recompute_ns
        order = self._order
        return (order.over_share(request), *order.victim_key(request, now_ns), -loss, *request.order_key)

    def _prices_of(self, num_tokens: int) -> tuple[int, int]:
        """(recompute, swap one way) in nanoseconds, of whole blocks: there are few different numbers of those."""
        if self._cost is None or not num_tokens:
            return num_tokens, 0
        size = self._live.cache.block_size
        whole = -(-num_tokens // size) * size
        return self._cost.recompute_ns(whole), self._cost.swap_ns(whole)
