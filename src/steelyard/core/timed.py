"""The lifecycle that is its own ledger: a thing is in exactly one state, and each state's time is a bucket.

    to(DECODE, t1)        [since, t1) goes to the old state's bucket; sum(buckets) == last t - first t, always

Times are integer nanoseconds handed in by the caller; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class State(Enum):
    """Every account a request's time can belong to. `ENDED` is terminal and has no bucket."""

    # edge (server)
    HTTP_READ = "http_read"
    AUTH = "auth"
    TOKENIZE = "tokenize"
    WIRE = "wire"
    IN_ENGINE = "in_engine"
    # waiting: why the last scheduler pass did not run it
    WAIT_STEP_BOUNDARY = "wait_step_boundary"
    WAIT_SLOT = "wait_slot"
    WAIT_KV = "wait_kv"
    WAIT_BUDGET = "wait_budget"
    WAIT_POLICY = "wait_policy"
    WAIT_GRAMMAR = "wait_grammar"
    # resident: it holds a row and blocks
    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"
    RESIDENT_UNSCHEDULED = "resident_unscheduled"
    ENGINE_GAP = "engine_gap"
    # displaced
    PREEMPTED = "preempted"
    SWAP_OUT = "swap_out"
    SWAPPED = "swapped"
    SWAP_IN = "swap_in"
    # tail
    OVERSHOOT = "overshoot"
    DETOKENIZE = "detokenize"
    STREAM = "stream"
    CLIENT_SLOW = "client_slow"
    ENDED = "ended"

    # Members are compared by identity, so may be hashed by it: an Enum's own hash is a call into Python at each look-up
    # of a bucket.
    __hash__ = object.__hash__

    @property
    def waiting(self) -> bool:
        """True for the states of a request that has not been admitted or was displaced and waits to return."""
        return self in _WAITING

    @property
    def resident(self) -> bool:
        """True while the request holds a row and KV blocks on the device."""
        return self in _RESIDENT


_WAITING = frozenset(
    {
        State.WAIT_STEP_BOUNDARY,
        State.WAIT_SLOT,
        State.WAIT_KV,
        State.WAIT_BUDGET,
        State.WAIT_POLICY,
        State.WAIT_GRAMMAR,
        State.PREEMPTED,
        State.SWAP_OUT,
        State.SWAPPED,
    }
)
_RESIDENT = frozenset(
    {
        State.PREFILL,
        State.DECODE,
        State.RECOMPUTE,
        State.RESIDENT_UNSCHEDULED,
        State.ENGINE_GAP,
        State.SWAP_IN,
    }
)


class Watcher(Protocol):
    """Hears of every move of what it watches, after the old state was charged."""

    def moved(self, timed: Timed, old: State, at_ns: int) -> None: ...


class Timed:
    """State, the instant it began, and the nanoseconds each former state took."""

    __slots__ = ("buckets_ns", "since_ns", "start_ns", "state", "watcher")

    def __init__(self, state: State, now_ns: int) -> None:
        self.state = state
        self.start_ns = now_ns
        self.since_ns = now_ns
        self.buckets_ns: dict[State, int] = {}
        self.watcher: Watcher | None = None

    def to(self, state: State, now_ns: int) -> None:
        """Close the current state at `now_ns` and enter `state`. Going back in time or leaving ENDED is our bug."""
        assert self.state is not State.ENDED, f"transition to {state} after the end"
        old = self.state
        self._charge(old, now_ns - self.since_ns)
        self.state = state
        self.since_ns = now_ns
        if self.watcher is not None:
            self.watcher.moved(self, old, now_ns)

    def split(self, now_ns: int, parts: Sequence[tuple[State, int]]) -> None:
        """Charge `[since_ns, now_ns)` to `parts` [(state, ns)], the rest to the current state, which stays.

        The parts must not exceed the interval.
        """
        assert self.state is not State.ENDED, "split after the end"
        rest = now_ns - self.since_ns
        for state, part_ns in parts:
            self._charge(state, part_ns)
            rest -= part_ns
        self._charge(self.state, rest)
        self.since_ns = now_ns

    @property
    def total_ns(self) -> int:
        """Nanoseconds accounted for so far: exactly `since_ns - start_ns`."""
        return self.since_ns - self.start_ns

    def _charge(self, state: State, amount_ns: int) -> None:
        assert amount_ns >= 0, f"{amount_ns} ns charged to {state}"
        if amount_ns:
            self.buckets_ns[state] = self.buckets_ns.get(state, 0) + amount_ns
