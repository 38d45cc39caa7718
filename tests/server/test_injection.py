"""A known delay anywhere between socket and engine moves its own account, by its own amount; the clock is virtual."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from steelyard.config import ServerConfig
from steelyard.core.step import StepPlan
from steelyard.core.timed import State, Timed
from steelyard.server.app import create_app, make_service
from steelyard.server.client import EngineClient
from steelyard.server.ledger import SLOW_WRITE_NS
from steelyard.server.metrics import Metrics
from steelyard.server.service import Service
from steelyard.server.tenants import Tenant, Tenants
from steelyard.sim.clock import VirtualClock
from steelyard.text.tokenizer import Tokenizer
from steelyard.wire.messages import Submit, ToEngine
from tests.server.real_engine import RealEngine, serve
from tests.server.served import Served, wait_for

STEP_NS = 1_000
MARK_NS = 12_345


class World:
    """A server and an engine in one loop; whoever is named in `delays_ns` takes that long, nothing else takes time."""

    def __init__(self, tokenizer: Tokenizer, **delays_ns: int) -> None:
        self.clock = clock = VirtualClock(10**9)
        self.delays_ns = delays_ns
        self.engine = engine = RealEngine(clock_ns=clock)
        engine.delay = self._step
        metrics = Metrics()
        client = EngineClient(self._send, clock, 20.0, metrics)
        engine.client = client
        client.on_messages([engine.engine.ready(), engine.engine.status()])
        self.service = make_service(
            ServerConfig(),
            client,
            metrics,
            model_name="tiny",
            tokenizer=slow(tokenizer, lambda: self.wait("encoding")),
            template=None,
            eos_token_ids=frozenset({2}),
            tenants=_SlowTenants(lambda: self.wait("key")),
            clock_ns=clock,
        )
        self.app = create_app(self.service)

    def wait(self, who: str) -> None:
        self.clock.advance(self.delays_ns.get(who, 0))

    def _step(self, plan: StepPlan) -> None:
        self.clock.advance(STEP_NS)
        self.wait("step")

    def _send(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.wait("wire")
        self.engine.send(message)

    def ask(self, **body: Any) -> dict[str, int]:
        """The final account of one request."""
        raw = json.dumps({"prompt": "The sea", "max_tokens": 6, **body}).encode()
        headers = [(b"authorization", b"Bearer boss"), (b"x-request-id", b"this")]
        messages = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                self.wait("body")
                return messages.pop()
            await asyncio.sleep(60)
            raise AssertionError("the request does not end")

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self.wait("reader")

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}

        async def run() -> None:
            self.engine.loop = asyncio.get_running_loop()
            await self.app(scope, receive, send)  # type: ignore[arg-type]
            while self.engine.engine.has_work:
                await asyncio.sleep(0)

        asyncio.run(run())
        self.service.prompts.close()
        record = self.service.ledgers.get("this", None)
        assert record is not None and record["status"] == 200
        buckets: dict[str, int] = record["buckets_ns"]
        assert sum(buckets.values()) == record["total_ns"] == self.clock.now_ns - 10**9
        return {name: amount_ns for name, amount_ns in buckets.items() if amount_ns}


class _SlowTenants(Tenants):
    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__([Tenant("boss", (hashlib.sha256(b"boss").digest(),), operator=True)], b"k" * 32)
        self._wait = wait

    def identify(self, authorization: bytes | None) -> Tenant:
        self._wait()
        return super().identify(authorization)


def slow(tokenizer: Tokenizer, wait: Callable[[], None]) -> Tokenizer:
    """The same tokenizer, but each encoding waits first."""

    class Slow(Tokenizer):
        def __init__(self) -> None:
            self.__dict__ = tokenizer.__dict__

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            wait()
            return super().encode(*args, **kwargs)

    return Slow()


DELAYS = {
    "key": ("auth", MARK_NS),
    "body": ("http_read", MARK_NS),
    "encoding": ("tokenize", MARK_NS),
    "wire": ("wire", MARK_NS),
    "reader": ("client_slow", SLOW_WRITE_NS + MARK_NS),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("who", DELAYS)
def test_a_delay_is_its_own_accounts_and_no_others(tokenizer: Tokenizer, who: str, stream: bool) -> None:
    account, amount_ns = DELAYS[who]
    plain = World(tokenizer).ask(stream=stream)
    assert plain == {"prefill": STEP_NS, "decode": 5 * STEP_NS}
    slowed = World(tokenizer, **{who: amount_ns}).ask(stream=stream)
    assert slowed == {**plain, account: amount_ns}


@pytest.mark.parametrize("forgotten", [State.HTTP_READ, State.TOKENIZE, State.IN_ENGINE])
def test_a_transition_that_is_forgotten_is_noticed(
    tokenizer: Tokenizer, forgotten: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = Timed.to

    def mutant(self: Timed, state: State, now_ns: int) -> None:
        if state is not forgotten:
            to(self, state, now_ns)

    monkeypatch.setattr(Timed, "to", mutant)
    delays = {who: amount_ns for who, (_, amount_ns) in DELAYS.items() if who != "reader"}
    whole = {DELAYS[who][0]: amount_ns for who, amount_ns in delays.items()}
    whole |= {"prefill": STEP_NS, "decode": 5 * STEP_NS}
    assert World(tokenizer, **delays).ask() != whole
    monkeypatch.undo()
    assert World(tokenizer, **delays).ask() == whole


def test_a_slow_step_is_the_engines_and_not_the_servers(tokenizer: Tokenizer) -> None:
    assert World(tokenizer, step=77).ask() == {"prefill": STEP_NS + 77, "decode": 5 * (STEP_NS + 77)}


def test_on_a_real_clock_a_large_delay_is_the_largest_account(tokenizer: Tokenizer) -> None:
    """Orders of accounts, not times: a delay far above all others is where the ledger finds it."""
    for place, account in (("tokenizer", "tokenize"), ("step", "decode")):
        engine = RealEngine()
        seconds = {"tokenizer": 0.0, "step": 0.0, place: 0.15}
        engine.delay = lambda plan, s=seconds: time.sleep(s["step"])  # type: ignore[misc]
        slowed = slow(tokenizer, lambda s=seconds: time.sleep(s["tokenizer"]))  # type: ignore[misc]
        for served in serve(slowed, None, engine):
            assert _largest(served, served.service) == account


def _largest(served: Served, service: Service) -> str:
    served.http.post("/v1/completions", json={"prompt": "The sea", "max_tokens": 4}, headers={"x-request-id": "this"})
    wait_for(lambda: service.ledgers.get("this", None) is not None, "it is over")
    record = service.ledgers.get("this", None)
    assert record is not None
    buckets: dict[str, int] = record["buckets_ns"]
    return max(buckets, key=lambda name: buckets[name])
