"""What the engine produced for one HTTP request and its handler has not taken yet, joined per choice.

    client --push--> [choice 0: ids...] [choice 1: ids...] --take--> handler
                '--> sink, while the handler waits: written through without waking it

A handler that is slow finds one longer delta in place of many: what is kept is bounded by the tokens asked for.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from steelyard.wire.messages import Delta, Finished, Logprob

_WORST_FIRST = ("error", "abort", "deadline", "length", "stop")


Sink = Callable[[int, Delta], bool]
"""Takes a choice's number and its delta, or returns False and leaves it."""


@dataclass(slots=True)
class Update:
    """News of one choice: ids (and logprobs beside them, if asked for), and its end if that has come."""

    index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finished: Finished | None = None


class Collector:
    """The updates of all choices of one HTTP request. One reader; writers are on the same event loop.

    n            choices a prompt; choice j of prompt i is number i * n + j
    ids          the engine's request ids, one a prompt
    arrived_ns   when the HTTP request came, on the server's clock
    first_ns     when its first token came from the engine; 0: not yet
    ended_ns     when its last choice ended; 0: not yet
    last_end     the last `Finished` so far; ends: of each choice that has ended
    deliveries   of each choice: (nanoseconds since arrival, tokens) of every delta, one after the other
    num_pending  tokens that have not been taken
    paused       the engine computes nothing for it, because its reader is behind
    when_over    called once the engine has let go of every prompt, be it refused or ended
    """

    def __init__(self, num_prompts: int, n: int, arrived_ns: int) -> None:
        self.n = n
        self.ids: list[str] = []
        self.arrived_ns = arrived_ns
        self.first_ns = 0
        self.ended_ns = 0
        self.last_end: Finished | None = None
        self.num_pending = 0
        self.paused = False
        self.ends: dict[int, Finished] = {}
        self.deliveries = [array("q") for _ in range(num_prompts * n)]
        self.when_over: Callable[[], None] | None = None
        self.num_held = num_prompts * n
        self.num_unfinished = num_prompts * n
        self.reasons: set[str] = set()
        self._last_token_ns = [0] * self.num_unfinished
        self._pending: dict[int, Update] = {}
        self._error: Exception | None = None
        self._sink: Sink | None = None
        self._wake = asyncio.Event()

    def push(self, index: int, delta: Delta, now_ns: int) -> int:
        """Add a delta of choice `index`; returns nanoseconds since the choice's token before, 0 if it is its first."""
        sink = self._sink
        if sink is None or self._pending or not sink(index, delta):
            update = self._update(index)
            update.ids += delta.ids
            self.num_pending += len(delta.ids)
            if delta.logprobs is not None:
                update.logprobs += delta.logprobs
            self._wake.set()
        self.deliveries[index].extend((now_ns - self.arrived_ns, len(delta.ids)))
        before_ns, self._last_token_ns[index] = self._last_token_ns[index], now_ns
        return now_ns - before_ns if before_ns else 0

    def finish(self, index: int, finished: Finished, now_ns: int) -> None:
        self._update(index).finished = finished
        self.reasons.add(finished.reason)
        self.num_unfinished -= 1
        self.last_end = self.ends[index] = finished
        if self.num_unfinished == 0:
            self.ended_ns = now_ns
        self._wake.set()

    def let_go(self, num_choices: int) -> None:
        """The engine holds that many choices less."""
        self.num_held -= num_choices
        if self.num_held == 0 and self.when_over is not None:
            self.when_over()

    def fail(self, error: Exception) -> None:
        """No more will come; what is pending is taken first, then `take` raises."""
        self._error = error
        self._wake.set()

    @property
    def outcome(self) -> str:
        """One word for all choices: the worst reason among them."""
        return next(
            (reason for reason in ("error", "abort", "deadline", "length", "stop") if reason in self.reasons), "abort"
        )

    async def take(self, sink: Sink | None = None) -> list[Update]:
        """Wait for news and take all of it, at most one update a choice. Raises the error given to `fail`.

        While waiting, deltas go to `sink` first, and those it takes are no news.
        """
        self._sink = sink
        try:
            while not self._pending:
                if self._error is not None:
                    raise self._error
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._sink = None
        updates = list(self._pending.values())
        self._pending.clear()
        self.num_pending = 0
        return updates

    def _update(self, index: int) -> Update:
        update = self._pending.get(index)
        if update is None:
            update = self._pending[index] = Update(index)
        return update
