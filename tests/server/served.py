"""A real HTTP server on a free port over an engine that answers by script, and how tests read and watch it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import openai
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from steelyard.config import ServerConfig
from steelyard.server.app import create_app, make_service
from steelyard.server.client import EngineClient
from steelyard.server.connection import BoundedHttp, HeadLimits
from steelyard.server.metrics import Metrics
from steelyard.server.service import Service
from steelyard.server.tenants import Tenants
from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer
from tests.server import fake_engine
from tests.server.fake_engine import FakeEngine


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
        return asyncio.run_coroutine_threadsafe(call(), self.engine.loop).result(60)


def start(
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    tenants: Tenants | None = None,
    engine: Any = None,
    **config: Any,
) -> Iterator[tuple[Any, ...]]:
    """Run a server in a thread; yields (url, engine, service). `engine`: another than the fake one."""
    hello = [fake_engine.ready(tokenizer.vocab_size if tokenizer else 320), fake_engine.idle()]
    hello = hello if engine is None else [engine.engine.ready(), engine.engine.status()]
    engine = engine or FakeEngine()
    metrics = Metrics()
    client = EngineClient(engine.send, time.monotonic_ns, 20.0, metrics)
    engine.client = client
    client.on_messages(hello)
    service = make_service(
        ServerConfig(**config),
        client,
        metrics,
        model_name="tiny",
        tokenizer=tokenizer,
        template=template,
        eos_token_ids=frozenset({2}),
        tenants=tenants,
    )
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    http = partial(BoundedHttp, limits=HeadLimits(8192, 40, service.config.header_timeout_s))
    app = create_app(service)
    server = uvicorn.Server(uvicorn.Config(app, http=http, lifespan="off", log_config=None, access_log=False))  # type: ignore[arg-type]

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
    thread.join(60)
    service.prompts.close()


def events(served: Served, path: str = "/v1/completions", **body: Any) -> list[str]:
    """The data of every event, by a strict reader: `data: ` lines and empty lines, nothing else."""
    body = body if "messages" in body else {"prompt": "The sea", **body}
    response = served.post(path, {"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    text = response.text
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def chunks(served: Served, **body: Any) -> list[dict[str, Any]]:
    data = events(served, **body)
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return [json.loads(item) for item in data[:-1]]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


def post_raw(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request on a socket of its own, and leave the answer unread."""
    raw = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


def counter(served: Served, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(served.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no {name} {labels}")
