"""A real engine over a scripted runner on the server's own loop: one process, no sockets between the two."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx

from steelyard.cache.manager import CacheManager
from steelyard.core.step import KvGroup, RunnerCaps, StepPlan
from steelyard.engine.engine import Engine, EngineOptions
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.protocols import Faults
from steelyard.scheduler.scheduler import Scheduler
from steelyard.server.client import EngineClient
from steelyard.sim.scripted import Script, ScriptedRunner
from steelyard.wire.messages import Accepted, Ask, Control, Pause, Resume, Stop, Submit, ToEngine
from tests.server.served import Served, start

CAPS = RunnerCaps(
    block_size=16,
    num_blocks=(64,),
    groups=(KvGroup(1),),
    max_rows=4,
    max_model_len=256,
    max_batched_tokens=64,
    vocab_size=320,
    overlaps=False,
    fingerprint="script",
    kv_layout="script/16",
)


class RealEngine:
    """Takes messages as the wire does and steps on the loop while there is work.

    delay    called with each plan before its results are given; may sleep
    answers  what the engine says, before the client hears it
    """

    def __init__(
        self, *, faults: Faults | None = None, clock_ns: Callable[[], int] = time.monotonic_ns, **caps: Any
    ) -> None:
        self.caps = replace(CAPS, **caps)
        self.delay: Callable[[StepPlan], None] = lambda plan: None
        script, delay = Script(2, (40, 41, 42) * 200), lambda plan: self.delay(plan)
        runner = ScriptedRunner(self.caps, script, delay=delay, clock=clock_ns)
        cache = CacheManager(self.caps, True)
        scheduler = Scheduler(self.caps, cache, SchedulerOptions(), faults=faults)
        self.engine = Engine(runner, cache, scheduler, EngineOptions("tiny", frozenset({2})), clock_ns=clock_ns)
        self.client: EngineClient | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._stepping = False

    def send(self, message: ToEngine) -> None:
        assert self.loop is not None
        self.loop.call_soon(self._take, message)

    def _take(self, message: ToEngine) -> None:
        engine, client = self.engine, self.client
        assert client is not None and self.loop is not None
        match message:
            case Submit():
                answer = engine.submit(message)
                client.on_messages([answer])
                if isinstance(answer, Accepted) and not self._stepping:
                    self._stepping = True
                    self.loop.call_soon(self._step)
            case Stop():
                client.on_messages(engine.stop(message))
            case Pause():
                engine.pause(message.id)
            case Resume():
                engine.resume(message.id)
            case Ask():
                client.on_messages([engine.ask(message)])
            case Control():
                client.on_messages(engine.control(message))

    def _step(self) -> None:
        assert self.client is not None and self.loop is not None
        self.client.on_messages(self.engine.step())
        if self.engine.scheduler.counters.steps % 8 == 0:
            self.client.on_messages([self.engine.status()])
        self._stepping = self.engine.has_work
        if self._stepping:
            self.loop.call_later(0 if self.engine.progressed else 0.005, self._step)


def serve(tokenizer: Any, template: Any, engine: RealEngine, **config: Any) -> Iterator[Served]:
    """A server over `engine`."""
    for url, _, service in start(tokenizer, template, engine=engine, **config):
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Served(url, engine, service, tokenizer, http)  # type: ignore[arg-type]
