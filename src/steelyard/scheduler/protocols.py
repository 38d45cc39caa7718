"""What is injected into the scheduler: order, batching, cost, and the hooks tests use to break things."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from steelyard.core.request import Request
from steelyard.scheduler.rows import Resident


class Order(Protocol):
    """Who goes first. Lower keys first; ties are broken by arrival.

    `changes`: keys depend on the time or on charges, so the queue is sorted again before each pass.
    `weighs`: `charge` is to be called after each step.
    """

    changes: bool
    weighs: bool

    def look(self, running: Sequence[Request], now_ns: int) -> None:
        """Called before keys that change are asked for again, with all that run."""
        ...

    def key(self, request: Request, now_ns: int) -> tuple[float, ...]: ...

    def victim_key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        """Its class: running requests of the highest key are preempted first, of those the one with least to lose.

        Of the same length for all requests.
        """
        ...

    def over_share(self, request: Request) -> bool:
        """Whether its tenant has more than its share: such a request is preempted before all others."""
        ...

    def activate(self, tenant: str, weight: float, others: Collection[str]) -> None:
        """A tenant without a waiting request is about to have one; `others` have some."""
        ...

    def budget(self, decodes: Sequence[Resident], most: int, now_ns: int) -> int:
        """Tokens for the next step, beside these decodes; `most` unless there is a reason for fewer."""
        ...

    def entered(self, request: Request) -> bool:
        """A request took a row. True: the keys of those that wait have changed."""
        ...

    def charge(self, tenant: str, amount_ns: int, num_tokens: int) -> None:
        """A step cost `tenant` device time for tokens that were not computed before."""
        ...

    def may_displace(self, waiting: Request, running: Request) -> bool:
        """Whether `running` is preempted so that `waiting`, the head of the queue, can run."""
        ...

    def may_pass(self, short: Request, head: Request) -> bool:
        """Whether a short prompt may run before the long one at the head of the queue."""
        ...


class Cost(Protocol):
    """Predicted nanoseconds."""

    def step_ns(self, num_tokens: int, num_rows: int, context_tokens: int) -> int: ...

    def recompute_ns(self, num_tokens: int) -> int: ...

    def swap_ns(self, num_tokens: int) -> int: ...


class Batching(Protocol):
    """When waiting requests may join, and how many tokens a step may have.

    held_slots  slots that were kept empty by the rule, counted once for each step
    """

    held_slots: int

    def may_join(self, waiting: Sequence[Request], num_running: int, now_ns: int) -> int:
        """How many of `waiting`, which is in order, may be admitted in this pass."""
        ...

    def budget(self, num_running: int, now_ns: int, cost: Cost | None) -> int | None:
        """Tokens for the next step; None: the engine's max_num_batched_tokens. Never more than that is used."""
        ...


class Faults:
    """Hooks for tests, no-ops here. Passed to the constructor; nothing else can set them."""

    def before_allocate(self, request: Request, num_tokens: int) -> bool:
        """False refuses the blocks, as if the pool were empty."""
        return True

    def before_step(self, step_id: int) -> None:
        """May raise, as a broken scheduler would."""

    def before_first_token(self, request: Request) -> str | None:
        """A message fails the request in place of its first token."""
        return None

    def before_compile(self, grammar: str) -> None:
        """May raise or take its time, as a grammar's compiler would. Called in that one's thread."""
