"""The servers under test: one for all tests with a tokenizer, and one for a test that wants none."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from steelyard.checkpoint.find import open_checkpoint
from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer
from tests import tiny_model
from tests.server import fake_engine
from tests.server.served import Served, start


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    checkpoint = open_checkpoint(str(tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")))
    return Tokenizer.from_checkpoint(checkpoint)


@pytest.fixture(scope="session")
def _server(tokenizer: Tokenizer) -> Iterator[Served]:
    template = ChatTemplate(tiny_model.TEMPLATE, tiny_model.BOS, tiny_model.IM_END)
    for url, engine, service in start(tokenizer, template, max_body_bytes=100_000):
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Served(url, engine, service, tokenizer, http)


@pytest.fixture
def served(_server: Served) -> Iterator[Served]:
    """The shared server with an engine as new; after the test nothing may run in it."""
    _server.engine.reset()
    _server.run(_server.engine.say, fake_engine.idle())
    yield _server
    deadline = time.monotonic() + 60
    while _server.engine.tasks or _server.service.num_in_flight:
        assert time.monotonic() < deadline, f"still running: {_server.engine.tasks}"
        time.sleep(0.01)
    assert _server.service.admission.num_requests == 0
    assert _server.service.admission.num_tokens == 0


@pytest.fixture
def bare() -> Iterator[Served]:
    """A server without a tokenizer."""
    for url, engine, service in start(None, None):
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Served(url, engine, service, None, http)  # type: ignore[arg-type]
