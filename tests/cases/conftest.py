"""Servers for the cases, one a configuration, started when first asked for; canary and idle invariant around each case.

Every case is black-box, over HTTP, against a tiny random model: block size 16, context 2048, 8 requests at once.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steelyard.checkpoint.find import open_checkpoint
from steelyard.text.tokenizer import Tokenizer
from tests import tiny_model
from tests.cases.case_list import INAPPLICABLE
from tests.cases.configurations import CONFIGURATIONS, POLICIES, RIG, SCRIPTED
from tests.cases.rig import Answer, Server


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint(str(model)))


@pytest.fixture(scope="session")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start a server with these flags; all are stopped at the end, and must exit 0."""
    logs = tmp_path_factory.mktemp("logs")
    running: list[Server] = []

    def start_one(*args: str, key: str | None = None) -> Server:
        server = Server(model, [*RIG, *args], logs / f"{len(running)}.log", key)
        running.append(server)
        return server

    yield start_one
    codes = [server.stop() for server in running]
    assert codes == [0] * len(codes)


@pytest.fixture(scope="session")
def servers(start: Callable[..., Server]) -> Callable[..., Server]:
    """A server by the name of its configuration and that of its order."""
    started: dict[tuple[str, str], Server] = {}

    def get(name: str, policy: str = "fcfs") -> Server:
        if (name, policy) not in started:
            started[name, policy] = start(*CONFIGURATIONS[name], *POLICIES[policy])
        return started[name, policy]

    return get


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "fcfs"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cases of sections S and K run under every order."""
    is_case = re.match(r"test_[sk]\d\d_", metafunc.function.__name__) is not None
    mark = metafunc.definition.get_closest_marker("on")
    has_own_policy = mark is not None and mark.args[0] == "priority"
    if is_case and "policy" in metafunc.fixturenames and not has_own_policy:
        others = [pytest.param(p, marks=pytest.mark.slow) for p in POLICIES if p != "fcfs"]
        metafunc.parametrize("policy", ["fcfs", *others], indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest, servers: Callable[..., Server], policy: str) -> Iterator[Server]:
    """The server of the case's `on` mark (default: plain), with the canary and the idle invariant before and after."""
    mark = request.node.get_closest_marker("on")
    server = servers(mark.args[0] if mark else "plain", policy)
    server.check_canary()
    yield server
    server.check_idle()
    server.check_canary()


@pytest.fixture(scope="session")
def solo(servers: Callable[[str], Server]) -> Callable[..., Answer]:
    """The same request alone, with caching off: the oracle. Greedy ones carry the gap of the best two tokens."""
    known: dict[str, Answer] = {}

    def ask(prompt: list[int], **body: object) -> Answer:
        key = json.dumps([prompt, body], sort_keys=True)
        if key not in known:
            known[key] = servers("solo").complete(prompt, logprobs=2, **body)
        return known[key]

    return ask


@pytest.fixture(scope="session")
def scripted(start: Callable[..., Server], tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server whose text is forced: one byte a token, so that every border falls between tokens."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    answers = [
        {"prompt": [prompt], "output": [by_byte[bytes([byte])] for byte in text.encode()]}
        for prompt, text in SCRIPTED.items()
    ]
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps({"eos_token_id": 2, "default": [5, 6, 7], "answers": answers}))
    return start("--script", str(path))


@pytest.fixture
def prompts() -> Callable[[int], list[int]]:
    """Random prompts of a length, never twice the same: no case hits another's cache."""
    rng = random.Random(os.urandom(8))
    return lambda length: [rng.randrange(3, tiny_model.VOCAB_SIZE) for _ in range(length)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line("reported faults that cannot arise here:")
    for case, why in INAPPLICABLE.items():
        terminalreporter.write_line(f"    {case}: {why}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on(name): the configuration of the server a case runs on")
