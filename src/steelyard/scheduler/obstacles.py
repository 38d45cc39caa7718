"""Why a waiting request does not join, and what the joiner remembers of that from pass to pass. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.request import Request
from steelyard.core.timed import State


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What a request waits for. A shared one is in the way of everybody behind it too; a private one is passed over."""

    state: State
    is_shared: bool


NO_BLOCKS = Obstacle(State.WAIT_KV, is_shared=True)
NO_ROW = Obstacle(State.WAIT_SLOT, is_shared=True)
NO_BUDGET = Obstacle(State.WAIT_BUDGET, is_shared=True)
BATCH_CLOSED = Obstacle(State.WAIT_POLICY, is_shared=True)
GRAMMAR_COMPILES = Obstacle(State.WAIT_GRAMMAR, is_shared=False)
NOT_YET = Obstacle(State.WAIT_POLICY, is_shared=False)
"""It is paused, or what it could share is being computed."""


@dataclass(slots=True)
class Walk:
    """One walk along the queue, from its head to its end or to a shared obstacle.

    at          index of the request looked at; that of the one in whose way `obstacle` is
    num_joined  requests that joined on the way
    skipped     those passed over, with their private reasons
    obstacle    the shared one that ended it; None: the queue's end
    is_stale    somebody gave way, or the order of those that wait has changed: the queue is walked again
    """

    at: int
    num_joined: int
    skipped: dict[Request, State]
    obstacle: Obstacle | None = None
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that did not fit when the cache had released blocks `num_releases` times."""

    request: Request
    num_releases: int


@dataclass(frozen=True, slots=True)
class Lack:
    """What the head of the queue lacked at the end of the last pass: a row or blocks."""

    head: Request
    obstacle: Obstacle


@dataclass(frozen=True, slots=True)
class Passes:
    """How many short requests passed `head` while it lacked a row or blocks."""

    head: Request
    count: int
