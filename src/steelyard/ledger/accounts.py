"""The request ledger's books: one account a choice, open while it lives, kept for a while when it has closed.

opened -> stay in a row, stay in a row, ... -> closed (ENDED): buckets, cost and tokens are final
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from steelyard.core.request import Request
from steelyard.core.timed import State, Timed
from steelyard.ledger.book import Stay, StepBook
from steelyard.ledger.little import Census

MAX_CLOSED = 2048
_SHORT_OF_BLOCKS = frozenset({State.WAIT_KV, State.PREEMPTED, State.SWAP_OUT})


class Held(NamedTuple):
    """The pool at a moment, as one request finds it: others that hold rows, and blocks by KV group that it does not."""

    num_requests: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class Account:
    """A choice's costs beside its buckets.

    kv_held          who had the blocks when it last began to wait for some

    computed_tokens  positions computed in all; lost_tokens: of those, the ones a failed row threw away
    shared_tokens    positions taken over from a sibling
    tickets          its stays in rows, in order
    """

    request: Request
    cost_ns: int = 0
    computed_tokens: int = 0
    lost_tokens: int = 0
    shared_tokens: int = 0
    tickets: list[int] = field(default_factory=list)
    row: int = -1
    kv_held: Held | None = None

    def tokens(self) -> dict[str, int]:
        """By kind. Of a choice that kept a token:

        computed = prompt - cached - shared + generated - 1 + recomputed + overshoot + lost; the last token is nobody's
        input. Of `lost`, drafted - accepted are guesses that were wrong.
        """
        request = self.request
        return {
            "prompt": request.prompt_len,
            "generated": request.num_generated,
            "cached": request.cached_tokens,
            "shared": self.shared_tokens,
            "recomputed": request.num_recomputed,
            "overshoot": request.num_overshoot,
            "lost": self.lost_tokens + request.num_drafted - request.num_accepted,
            "drafted": request.num_drafted,
            "accepted": request.num_accepted,
            "computed": self.computed_tokens,
        }

    def as_dict(self, now_ns: int) -> dict[str, Any]:
        """Plain values; a running request's buckets up to `now_ns`, after the scheduler has settled it."""
        request = self.request
        buckets = {state.value: amount_ns for state, amount_ns in request.buckets_ns.items()}
        if request.state is not State.ENDED and now_ns > request.since_ns:
            name = request.state.value
            buckets[name] = buckets.get(name, 0) + now_ns - request.since_ns
        return {
            "id": request.id,
            "index": request.index,
            "tenant": request.tenant,
            "state": request.state.value,
            "reason": request.reason.value if request.reason is not None else None,
            "total_ns": sum(buckets.values()),
            "buckets_ns": buckets,
            "cost_ns": self.cost_ns,
            "tokens": self.tokens(),
            "preemptions": request.num_preemptions,
            "kv_held": None if self.kv_held is None else self.kv_held._asdict(),
        }


class Accounts:
    """All choices, live and lately closed. Watches each from its first state to its last."""

    def __init__(self, book: StepBook) -> None:
        self.census = Census()
        self.closed_ns: dict[State, int] = dict.fromkeys(State, 0)
        self.num_closed = 0
        self.closed_cost_ns = 0
        self.held: Callable[[Request], Held] | None = None
        self._book = book
        self._live: dict[Request, Account] = {}
        self._at: dict[int, Account] = {}  # who was last charged for a row
        self._closed: OrderedDict[tuple[str, int], Account] = OrderedDict()

    def open(self, request: Request) -> None:
        """From here on every move of the request is seen."""
        self._live[request] = Account(request)
        self.census.come(request.state, request.start_ns)
        request.watcher = self

    def moved(self, timed: Timed, old: State, at_ns: int) -> None:
        """core.timed.Watcher."""
        state = timed.state
        self.census.move(old, state, at_ns)
        if state is State.ENDED:
            assert isinstance(timed, Request)
            self._close(timed)
        elif state in _SHORT_OF_BLOCKS and self.held is not None:
            assert isinstance(timed, Request)
            self._live[timed].kv_held = self.held(timed)

    def enter(self, request: Request, row: int, start: int) -> None:
        """The request takes a row, with KV below `start` valid."""
        account = self._live[request]
        self.settle(account)
        former = self._at.get(row)
        if former is not None and former.row == row:  # preempted, not back yet: what the row was charged is its own
            self.settle(former)
            former.row = -1
        known_len = start if request.is_decoding else len(request.tokens)
        stay = Stay(request.id, request.index, request.tenant, row, known_len, request.recompute_until)
        if not account.tickets:
            account.shared_tokens = start - request.cached_tokens
        account.tickets.append(self._book.enter(stay))
        account.row = row
        self._at[row] = account

    def lose(self, request: Request, num_tokens: int) -> None:
        """A row failed: what it computed is worth nothing."""
        self._live[request].lost_tokens += num_tokens

    def get(self, request: Request) -> Account | None:
        """The account of a request, live or just closed, its costs up to date."""
        account = self._live.get(request) or self._closed.get(request.key)
        if account is not None:
            self.settle(account)
        return account

    def of(self, request_id: str) -> list[Account]:
        """Accounts of all choices known under this id, closed ones first."""
        found = [a for (id, _), a in self._closed.items() if id == request_id]
        found += [a for request, a in self._live.items() if request.id == request_id]
        for account in found:
            self.settle(account)
        return found

    def recent(self, count: int) -> list[Request]:
        """The requests that came last, of those that are live or lately closed, oldest first."""
        known = [a.request for a in self._closed.values()] + list(self._live)
        return sorted(known, key=lambda request: request.start_ns)[-count:]

    @property
    def live(self) -> list[Account]:
        return list(self._live.values())

    def settle(self, account: Account) -> None:
        """Move what its row was charged into the account."""
        row = account.row
        if row >= 0:
            book = self._book
            account.cost_ns += int(book.cost_ns[row])
            account.computed_tokens += int(book.num_tokens[row])
            book.cost_ns[row] = book.num_tokens[row] = 0

    def _close(self, request: Request) -> None:
        account = self._live.pop(request)
        self.settle(account)
        account.row = -1
        for state, amount_ns in request.buckets_ns.items():
            self.closed_ns[state] += amount_ns
        self.num_closed += 1
        self.closed_cost_ns += account.cost_ns
        self._closed[request.key] = account
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
