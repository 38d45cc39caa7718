"""A real HTTP server on a free port over an engine that answers by script; the tokenizer is the tiny model's."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fake_engine
import httpx
import openai
import pytest
import uvicorn
from fake_engine import FakeEngine

import tiny_model
from steelyard.checkpoint.find import open_checkpoint
from steelyard.config import ServerConfig
from steelyard.server.app import create_app, make_service
from steelyard.server.client import EngineClient
from steelyard.server.metrics import Metrics
from steelyard.server.service import Service
from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer


@dataclass
class Served:
    """A running server: where it is, what is behind it."""

    url: str
    engine: FakeEngine
    service: Service
    tokenizer: Tokenizer
    http: httpx.Client

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "The sea", **body})

    def say(self, text: str) -> None:
        """Let the engine answer with the tokens of `text`, one byte a token, and the end of text."""
        ids = [self.tokenizer.encode(chr(b), False)[0] if b < 128 else self.byte_ids[b] for b in text.encode()]
        self.engine.reply = lambda submit, index: [*ids, 2]

    @property
    def byte_ids(self) -> dict[int, int]:
        pieces = {self.tokenizer.token_bytes(i): i for i in range(self.tokenizer.vocab_size)}
        return {raw[0]: i for raw, i in pieces.items() if len(raw) == 1}

    def run(self, function: Any, *args: Any) -> Any:
        """Call `function` on the server's loop and wait for it."""

        async def call() -> Any:
            return function(*args)

        assert self.engine.loop is not None
        return asyncio.run_coroutine_threadsafe(call(), self.engine.loop).result(10)


def start(tokenizer: Tokenizer | None, template: ChatTemplate | None, **config: Any) -> Iterator[tuple[Any, ...]]:
    """Run a server in a thread; yields (url, engine, service)."""
    engine = FakeEngine()
    metrics = Metrics()
    client = EngineClient(engine.send, time.monotonic_ns, 20.0, metrics)
    engine.client = client
    client.on_messages([fake_engine.ready(tokenizer.vocab_size if tokenizer else 320), fake_engine.idle()])
    service = make_service(
        ServerConfig(**config),
        client,
        metrics,
        model_name="tiny",
        tokenizer=tokenizer,
        template=template,
        eos_token_ids=frozenset({2}),
    )
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(service), lifespan="off", log_config=None, access_log=False))

    async def serve() -> None:
        engine.loop = asyncio.get_running_loop()
        await server.serve(sockets=[sock])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{sock.getsockname()[1]}", engine, service
    server.should_exit = True
    server.force_exit = True
    thread.join(10)
    service.prompts.close()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    checkpoint = open_checkpoint(str(tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")))
    return Tokenizer.from_checkpoint(checkpoint)


@pytest.fixture(scope="session")
def _server(tokenizer: Tokenizer) -> Iterator[Served]:
    template = ChatTemplate(tiny_model.TEMPLATE, tiny_model.BOS, tiny_model.IM_END)
    for url, engine, service in start(tokenizer, template, max_body_bytes=100_000):
        with httpx.Client(base_url=url, timeout=20) as http:
            yield Served(url, engine, service, tokenizer, http)


@pytest.fixture
def served(_server: Served) -> Iterator[Served]:
    """The shared server with an engine as new; after the test nothing may run in it."""
    _server.engine.reset()
    _server.run(_server.engine.say, fake_engine.idle())
    yield _server
    deadline = time.monotonic() + 5
    while _server.engine.tasks or _server.service.num_in_flight:
        assert time.monotonic() < deadline, f"still running: {_server.engine.tasks}"
        time.sleep(0.01)
    assert _server.service.admission.num_requests == 0
    assert _server.service.admission.num_tokens == 0


@pytest.fixture
def bare() -> Iterator[Served]:
    """A server without a tokenizer."""
    for url, engine, service in start(None, None):
        with httpx.Client(base_url=url, timeout=20) as http:
            yield Served(url, engine, service, None, http)  # type: ignore[arg-type]
