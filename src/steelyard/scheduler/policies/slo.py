"""Deadlines: the first token by the request's TTFT target, each further one by its TPOT target.

    key = (rank, deadline + alpha * predicted work)        alpha 0: earliest deadline; large: shortest work

A request that can no longer make its first token in time is relegated behind all that can: it is served with what they
leave, and does not drag them beyond their own deadlines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from steelyard.core.request import Request
from steelyard.scheduler.policies.fcfs import Fcfs
from steelyard.scheduler.protocols import Cost
from steelyard.scheduler.rows import Resident

BEST_EFFORT_NS = 10_000_000_000
"""The deadline, after its arrival, of a request without a target."""
ALPHA = 1.0
RELEGATED_SHARE = 16
"""Of so many admissions one goes to the oldest relegated request."""
MARGIN = 2
"""A prompt takes up to so many times what it and those before it take alone: others share its steps."""
LEAST_SHARE = 16
"""One part in so many of a full step is given to prefills however tight the decodes are."""
_FIRST, _NORMAL, _RELEGATED = -1, 0, 1


class Slo(Fcfs):
    """The relegated are preempted first.

    Only a waiting request is relegated: what has a row is finished, for half a prompt is worth nothing. Relegation is
    for good, but that every `RELEGATED_SHARE`-th request that enters lifts the oldest relegated one to the front.

    Starvation bound: before a request in time go only those with an earlier key, so none that arrives later than its
    target + alpha * its work; the k-th oldest relegated one is at the front within RELEGATED_SHARE * k admissions.
    """

    changes = True

    def __init__(self, cost: Cost | None = None, alpha: float = ALPHA) -> None:
        self._cost = cost
        self._alpha = alpha
        self._relegated: deque[Request] = deque()
        self._num_entered = 0
        self._ahead_ns = 0

    def look(self, running: Sequence[Request], now_ns: int) -> None:
        """The prompts that run now are computed before any that waits."""
        self._ahead_ns = sum(self._work_ns(r) for r in running if not r.num_generated)

    def key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        due_ns = first_due_ns(request)
        if request.num_generated:
            return (min(request.slo_rank, _NORMAL), due_ns)
        if request.row < 0 and request.slo_rank == _RELEGATED and request.order_key:
            return request.order_key[:-1]
        work_ns = self._work_ns(request)
        is_due = request.slo_rank == _NORMAL and request.ttft_slo_ns is not None and request.row < 0
        if is_due and now_ns + MARGIN * (self._ahead_ns + work_ns) > due_ns:
            request.slo_rank = _RELEGATED
            self._relegated.append(request)
        return (request.slo_rank, due_ns + self._alpha * work_ns)

    def _work_ns(self, request: Request) -> int:
        return self._cost.recompute_ns(len(request.tokens) - request.num_computed) if self._cost is not None else 0

    def victim_key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        return request.order_key[:1]

    def entered(self, request: Request) -> bool:
        self._num_entered += 1
        if self._num_entered % RELEGATED_SHARE:
            return False
        self._relegated = deque(r for r in self._relegated if r.state.waiting and r.slo_rank == _RELEGATED)
        if not self._relegated:
            return False
        self._relegated.popleft().slo_rank = _FIRST
        return True

    def budget(self, decodes: Sequence[Resident], most: int, now_ns: int) -> int:
        """The most tokens of which a step is predicted to end before the tightest next token is due.

        A stream that is late already is held to its target from now on, and slows the others no further. By bisection:
        a prediction costs microseconds.
        """
        if self._cost is None:
            return most
        slack_ns, context = _tightest(decodes, now_ns)
        if slack_ns is None:
            return most
        low, high = min(len(decodes) + max(1, most // LEAST_SHARE), most), most
        while low < high:
            middle = (low + high + 1) // 2
            if self._cost.step_ns(middle, len(decodes), context) <= slack_ns:
                low = middle
            else:
                high = middle - 1
        return low

    def may_pass(self, short: Request, head: Request) -> bool:
        return short.slo_rank <= head.slo_rank


def _tightest(decodes: Sequence[Resident], now_ns: int) -> tuple[int | None, int]:
    """(time until the first next token is due, or None without any target; tokens of context of all)."""
    slack_ns, context = None, 0
    for resident in decodes:
        request = resident.request
        context += len(request.tokens)
        target_ns = request.tpot_slo_ns
        if target_ns is not None:
            left_ns = next_due_ns(request) - now_ns
            left_ns = left_ns if left_ns > 0 else target_ns
            slack_ns = left_ns if slack_ns is None else min(slack_ns, left_ns)
    return slack_ns, context


def next_due_ns(request: Request) -> int:
    """When the next token of a decoding request with a TPOT target is due."""
    assert request.tpot_slo_ns is not None
    return request.first_token_ns + request.num_generated * request.tpot_slo_ns


def first_due_ns(request: Request) -> int:
    """When its first token is due."""
    return request.start_ns + (BEST_EFFORT_NS if request.ttft_slo_ns is None else request.ttft_slo_ns)
