"""The server's half of the wire: submits prompts, routes what comes back, and knows whether the engine lives.

    handler --submit--> Submit ---> engine          engine ---> Accepted | Refused --> the waiting submit
                                                            ---> Deltas, Finished --> collectors
                                                            ---> Status           --> gauges, health

No socket and no process here: `send` takes messages, `on_messages` gets them, `died` says that the engine has.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from steelyard.core.hashing import chain, root_hash
from steelyard.core.sampling import SamplingParams
from steelyard.errors import EngineDead, SteelyardError
from steelyard.server.collector import Collector
from steelyard.server.errors import refusal
from steelyard.server.metrics import Metrics
from steelyard.server.public import PublicPrefixes
from steelyard.server.tenants import NAMESPACE_BYTES
from steelyard.server.terms import Prompt, Terms, submit_of
from steelyard.server.vitals import Vitals
from steelyard.wire.messages import (
    Accepted,
    Answer,
    Ask,
    Control,
    Deltas,
    Fault,
    Finished,
    FromEngine,
    Pause,
    Pulse,
    Ready,
    Refused,
    Resume,
    Status,
    Stop,
    ToEngine,
    Vocabulary,
)

NS = 1_000_000_000
MAX_PENDING_TOKENS = 2048
"""Of one HTTP request, made and not taken by its reader: beyond them the engine goes on with others."""


@dataclass(slots=True)
class _Open:
    """A submitted prompt: its collector, the number of its first choice there, and choices that have not ended."""

    collector: Collector
    base: int
    num_unfinished: int


class EngineClient:
    """One engine, seen from the HTTP process. All methods are called on one event loop."""

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        clock_ns: Callable[[], int],
        stall_limit_s: float,
        metrics: Metrics,
        step_limit_s: float = 300.0,
    ) -> None:
        self._send = send
        self._clock_ns = clock_ns
        self._vitals = Vitals(clock_ns, stall_limit_s, step_limit_s)
        self._metrics = metrics
        self._name = uuid.uuid4().hex[:12]
        self._numbers = itertools.count(1)
        self._open: dict[str, _Open] = {}
        self._waiting: dict[str, asyncio.Future[Accepted]] = {}
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._ready: asyncio.Future[Ready] | None = None
        self._knows_vocabulary = False
        self.vocabulary: Callable[[], Vocabulary] | None = None
        self.public: PublicPrefixes | None = None
        self.info: Ready | None = None
        self.death: str | None = None

    # ---- life -------------------------------------------------------------------------------------------------

    async def ready(self) -> Ready:
        """Wait until the engine can make tokens. Raises EngineDead if it dies first."""
        if self.info is not None:
            return self.info
        self._check_alive()
        self._ready = asyncio.get_running_loop().create_future()
        return await self._ready

    def died(self, why: str) -> None:
        """Nothing more will come from the engine: every request in flight gets an error. Idempotent."""
        if self.death is not None:
            return
        self.death = why
        error = EngineDead(why)
        futures: list[asyncio.Future[Any]] = [*self._waiting.values(), *self._asked.values()]
        if self._ready is not None:
            futures.append(self._ready)
        for future in futures:
            if not future.done():
                future.set_exception(error)
        self.fail_all(error)
        for _ in {open_.collector for open_ in self._open.values()}:
            self._metrics.request_ended("error")
        for open_ in self._open.values():
            open_.collector.let_go(open_.num_unfinished)
        self._open.clear()

    def fail_all(self, error: SteelyardError) -> None:
        """End every request in flight with `error`; what already came is delivered first."""
        for collector in {open_.collector for open_ in self._open.values()}:
            collector.fail(error)

    def unhealthy(self) -> str | None:
        """Why no token can be made, or None. Costs nothing: the engine reports its progress by itself."""
        if self.death is not None:
            return self.death
        return "the engine is starting" if self.info is None else self.stuck()

    def stuck(self) -> str | None:
        """Why a living engine makes no token, or None."""
        return self._vitals.stuck()

    @property
    def status(self) -> Status | None:
        return self._vitals.status

    def watch(self) -> None:
        """Called several times a second: requests that a stuck engine holds get an error, and are stopped in it."""
        why = self.stuck() if self._open and self.info is not None and self.death is None else None
        if why is not None:
            self.fail_all(EngineDead(why))
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(EngineDead(why))

    # ---- requests ---------------------------------------------------------------------------------------------

    def block_hashes(self, ids: Sequence[int], namespace: bytes = b"") -> list[bytes]:
        """Keys of the full blocks of a prompt in a namespace; safe in a thread.

        Only a tenant's own namespace shares what is public: a salt keeps a prompt apart from everybody.
        """
        info = self.info
        assert info is not None, "hashes asked for before the engine is ready"
        if not info.enable_prefix_caching:
            return []
        if self.public is not None and len(namespace) == NAMESPACE_BYTES:
            return self.public.keys(ids, namespace)
        return chain(root_hash(info.fingerprint, info.kv_layout, namespace), ids, info.block_size)

    async def submit(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        terms: Terms,
        arrived_ns: int,
        opened: Callable[[Collector], None] = lambda collector: None,
    ) -> Collector:
        """Send the prompts and wait until each is accepted; choice j of prompt i is number i * n + j.

        Raises what the engine refused one of them with (the others are stopped), or EngineDead. `opened` gets the
        collector before anything is sent, for an account that must close whatever happens.
        The caller closes the collector with `close`, whatever happens.
        """
        self._check_alive()
        collector = Collector(len(prompts), sampling.n, arrived_ns)
        opened(collector)
        loop = asyncio.get_running_loop()
        accepted: list[asyncio.Future[Accepted]] = []
        try:
            if terms.grammar:
                self._send_vocabulary()
            for i, prompt in enumerate(prompts):
                id = f"{self._name}-{next(self._numbers)}"
                collector.ids.append(id)
                self._open[id] = _Open(collector, i * sampling.n, sampling.n)
                future = self._waiting[id] = loop.create_future()
                accepted.append(future)
                self._send(submit_of(id, prompt, sampling, terms, self._clock_ns() - arrived_ns))
            for answer in await asyncio.gather(*accepted):
                self._metrics.params_max_tokens.observe(answer.max_tokens)
        except BaseException:
            for future in accepted:
                future.cancel()
            self.close(collector)
            raise
        self._metrics.params_n.observe(sampling.n)
        return collector

    def _send_vocabulary(self) -> None:
        if not self._knows_vocabulary:
            assert self.vocabulary is not None, "a grammar without a tokenizer"
            self._send(self.vocabulary())
            self._knows_vocabulary = True

    def stop_choice(self, collector: Collector, index: int, keep: int) -> None:
        """A stop string was found in a choice: end it there, as a success of `keep` tokens."""
        id = collector.ids[index // collector.n]
        if id in self._open and self.death is None:
            self._send(Stop(id, index % collector.n, "stop_string", keep))

    def resume(self, collector: Collector) -> None:
        """The reader has caught up; nothing happens if the request was not paused."""
        if collector.paused:
            collector.paused = False
            self._to_each(collector, Resume)

    def _to_each(self, collector: Collector, message: type[Pause] | type[Resume]) -> None:
        for id in collector.ids:
            if id in self._open and self.death is None:
                self._send(message(id))

    def close(self, collector: Collector) -> None:
        """The request's handler is done with it; what still runs is stopped, for its client has left. Idempotent.

        The entries stay until the engine has said how they ended, so that abandoned work is counted.
        """
        for id in collector.ids:
            self._waiting.pop(id, None)
            if id in self._open and self.death is None:
                with suppress(EngineDead):  # the channel closes before the last handlers do
                    self._send(Stop(id, -1, "disconnect"))
        collector.ids.clear()

    async def ask(self, what: str) -> Any:
        """The engine's answer to `what`: stats, config, memory, check."""
        self._check_alive()
        id = f"{self._name}-{next(self._numbers)}"
        self._asked[id] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(id, what))
            return await self._asked[id]
        finally:
            del self._asked[id]

    def control(self, what: str, namespace: bytes = b"") -> None:
        if self.death is None:
            self._send(Control(what, namespace))

    # ---- what the engine says ---------------------------------------------------------------------------------

    def on_messages(self, messages: Sequence[FromEngine]) -> None:
        """Take a batch from the channel, in order."""
        now_ns = self._vitals.heard_ns = self._clock_ns()
        for message in messages:
            match message:
                case Deltas():
                    self._on_deltas(message, now_ns)
                case Finished():
                    self._on_finished(message, now_ns)
                case Status():
                    self._vitals.reported(message)
                case Pulse():
                    self._vitals.step_ns = message.step_ns
                case Accepted():
                    self._resolve(self._waiting.pop(message.id, None), message)
                case Refused():
                    self._on_refused(message)
                case Answer():
                    self._resolve(self._asked.get(message.id), message.value)
                case Ready():
                    self._on_ready(message)
                case Fault():
                    self.died(message.message)

    def _on_deltas(self, deltas: Deltas, now_ns: int) -> None:
        for delta in deltas.items:
            open_ = self._open.get(delta.id)
            if open_ is None:
                continue
            collector = open_.collector
            gap_ns = collector.push(open_.base + delta.index, delta, now_ns)
            if gap_ns:
                self._metrics.itl.observe(gap_ns / len(delta.ids) / NS, len(delta.ids))
            if collector.num_pending > MAX_PENDING_TOKENS and not collector.paused:
                collector.paused = True
                self._to_each(collector, Pause)
            if collector.first_ns == 0:
                collector.first_ns = now_ns
                self._metrics.ttft.observe((now_ns - collector.arrived_ns) / NS)

    def _on_finished(self, finished: Finished, now_ns: int) -> None:
        open_ = self._open.get(finished.id)
        if open_ is None:
            return
        collector = open_.collector
        collector.finish(open_.base + finished.index, finished, now_ns)
        self._metrics.choice_ended(finished)
        open_.num_unfinished -= 1
        if open_.num_unfinished == 0:
            del self._open[finished.id]
        if collector.num_unfinished == 0:
            self._metrics.e2e.observe((now_ns - collector.arrived_ns) / NS)
            self._metrics.request_ended(collector.outcome)
        collector.let_go(1)

    def _on_refused(self, refused: Refused) -> None:
        open_ = self._open.pop(refused.id, None)
        if open_ is not None:
            open_.collector.let_go(open_.num_unfinished)
        future = self._waiting.pop(refused.id, None)
        if future is not None and not future.done():
            future.set_exception(refusal(refused))

    def _on_ready(self, ready: Ready) -> None:
        self.info = ready
        self._resolve(self._ready, ready)

    def _resolve(self, future: asyncio.Future[Any] | None, value: Any) -> None:
        if future is not None and not future.done():
            future.set_result(value)

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDead(self.death)
