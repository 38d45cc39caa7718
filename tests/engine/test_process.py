"""The engine as a process: it says when it is ready, serves, drains, says why it failed, and dies with its parent."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from steelyard.config import EngineConfig
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import RowWork, StepPlan
from steelyard.engine import process as process_module
from steelyard.engine.spawn import start_engine_process
from steelyard.errors import StartError
from steelyard.wire.channel import EngineSide, Received, new_address, remove_address
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
    Ready,
    Refused,
    Resume,
    Status,
    Stop,
    Submit,
    ToEngine,
)
from tests import tiny_model
from tests.engine.engine_harness import Harness
from tests.wire.threaded import ThreadedSide

T = TypeVar("T")
WAIT_S = 120
HELD_NS = 10**9


class Client:
    """A server's end that keeps what it hears in a queue."""

    def __init__(self, address: str) -> None:
        self._queue: queue.Queue[FromEngine] = queue.Queue()
        self.side = ThreadedSide(address, self._put)

    def _put(self, batch: list[FromEngine]) -> None:
        for message in batch:
            self._queue.put(message)

    def until(self, kind: type[T], where: Callable[[T], bool] = lambda message: True) -> T:
        """The next message of a kind; others are passed over."""
        deadline = time.monotonic() + WAIT_S
        while True:
            message = self._queue.get(timeout=deadline - time.monotonic())
            if isinstance(message, kind) and where(message):
                return message

    def complete(self, id: str) -> tuple[list[int], Finished]:
        ids: list[int] = []
        while True:
            message = self.until(object)
            if isinstance(message, Deltas):
                ids += [token for item in message.items if item.id == id for token in item.ids]
            elif isinstance(message, Finished) and message.id == id:
                return ids, message


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("process")
    model = tiny_model.write(folder / "tiny")
    script = folder / "script.json"
    script.write_text(json.dumps({"eos_token_id": 2, "default": [10, 11, 12]}))
    return EngineConfig(model=str(model), script=str(script), max_model_len=1_000_000, num_gpu_blocks_override=100_000)


@pytest.fixture
def address() -> Iterator[str]:
    made = new_address()
    yield made
    remove_address(made)


def end(process: subprocess.Popen[Any], client: Client) -> None:
    client.side.close()
    process.kill()
    process.wait()


def test_a_process_serves_answers_and_drains(config: EngineConfig, address: str) -> None:
    process = start_engine_process(config, address)
    client = Client(address)
    try:
        ready = client.until(Ready)
        assert ready.model == "tiny" and ready.vocab_size == tiny_model.VOCAB_SIZE and ready.block_size == 16
        assert ready.config["num_blocks"] == [100_000]

        client.side.send(Submit("a", [1, 2, 3], SamplingParams()))
        assert client.until(Accepted).id == "a"
        ids, finished = client.complete("a")
        assert ids == [10, 11, 12, 2]
        assert (finished.reason, finished.usage.prompt_tokens) == ("stop", 3)
        assert sum(finished.ledger.values()) > 0

        client.side.send(Submit("b", [9999], SamplingParams()))
        assert client.until(Refused).status == 400
        client.side.send(Ask("q", "check"))
        assert client.until(Answer) == Answer("q", {"ok": True, "broken": ""})

        second = Client(address)
        assert second.until(Ready) == ready
        endless = SamplingParams(ignore_eos=True)
        second.side.send(Submit("c", [4], endless))
        second.until(Deltas)
        client.side.send(Stop("c", -1, "abort"))  # not its own: nothing happens
        client.side.send(Ask("q2", "stats"))
        assert client.until(Answer).value["running"] == 1
        second.side.close()  # its request is stopped without a word
        assert not client.until(Status, lambda s: not s.running).busy

        client.side.send(Submit("d", [4], endless))
        client.until(Deltas)
        client.side.send(Pause("d"))
        client.until(Status, lambda s: s.running == 1)
        client.side.send(Resume("d"))
        client.until(Deltas)

        process.send_signal(signal.SIGINT)  # the parent decides
        process.send_signal(signal.SIGTERM)
        client.side.send(Submit("e", [4], SamplingParams()))
        assert client.until(Refused).status == 503
        assert process.poll() is None
        client.side.send(Stop("d", 0, "stop_string", 1))
        assert client.complete("d")[1].usage.completion_tokens == 1
        assert process.wait(WAIT_S) == 0
    finally:
        end(process, client)


class Serving:
    """`serve` on an engine made here, in this process; what it says is read when it has returned.

    Its server has connected, and what it sends has arrived, before the loop begins: the first `recv` returns it all.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, address: str, **harness: Any) -> None:
        self.harness = Harness(**harness)
        self.harness.engine.clock_ns = time.monotonic_ns
        monkeypatch.setattr(process_module, "build_engine", lambda config, **given: self.harness.engine)
        monkeypatch.setattr(process_module.gc, "freeze", lambda: None)
        monkeypatch.setattr(process_module.signal, "signal", lambda *given: None)
        self.channel = EngineSide(address)
        self.client = Client(address)
        while not self.channel.peers:  # an engine that fails at once would greet a later server with its Fault alone
            assert not self.channel.recv(WAIT_S * 1000)
        self._monkeypatch = monkeypatch

    def run(self, *messages: ToEngine) -> int:
        for message in messages:
            self.client.side.send(message)
        arrived: list[Received] = []
        while len(arrived) < len(messages):
            arrived += self.channel.recv(WAIT_S * 1000)
        later = self.channel.recv
        batches = iter([arrived])
        self._monkeypatch.setattr(self.channel, "recv", lambda timeout_ms: next(batches, None) or later(timeout_ms))
        status = process_module.serve(EngineConfig(), self.channel)
        self.client.until(Ready)
        return status


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch, address: str) -> Iterator[Callable[..., Serving]]:
    made: list[Serving] = []

    def make(**harness: Any) -> Serving:
        made.append(Serving(monkeypatch, address, **harness))
        return made[-1]

    yield make
    for each in made:
        each.client.side.close()
        each.channel.close()


def test_halt_ends_the_loop_with_everything_in_it(serving: Callable[..., Serving]) -> None:
    server = serving()
    assert server.run(Submit("a", [4], SamplingParams(max_tokens=9)), Control("halt")) == 0
    assert server.client.complete("a")[1].reason == "abort"
    server.client.until(Status, lambda status: not status.busy)


def test_drain_ends_the_loop_when_what_runs_is_done(serving: Callable[..., Serving]) -> None:
    server = serving(overlap=True)
    messages = [Submit(str(i), [4, i], SamplingParams(max_tokens=20, n=2)) for i in range(20)]
    assert server.run(*messages, Control("drain")) == 0
    reasons = [server.client.until(Finished).reason for _ in range(40)]
    assert reasons == ["length"] * 40


def test_a_request_that_comes_during_a_step_waits_for_the_boundary_from_its_arrival_on(address: str) -> None:
    """Its message lies unread while the engine computes: that is the engine's time, not the wire's."""
    stamped = threading.Semaphore(0)
    sent: list[str] = []

    def within_a_step(plan: StepPlan, work: RowWork) -> None:
        if not sent:
            sent.append("b")
            client.side.send(Submit("b", [5], SamplingParams(max_tokens=1)))
            client.side.send(Control("drain"))
            assert all(stamped.acquire(timeout=WAIT_S) for _ in range(2))
            harness.clock.advance(HELD_NS)

    def clock_ns() -> int:
        if sent:
            stamped.release()
        return harness.clock.now_ns

    harness = Harness(fail=within_a_step)
    channel = EngineSide(address, clock_ns)
    client = Client(address)
    client.side.send(Submit("a", [4], SamplingParams(max_tokens=2)))
    process_module.Loop(harness.engine, channel).run()
    first, second = client.complete("a")[1], client.complete("b")[1]
    assert first.ledger.get("wait_step_boundary", 0) < HELD_NS <= second.ledger["wait_step_boundary"]
    assert sum(second.ledger.values()) < 2 * HELD_NS
    client.side.close()
    channel.close()


def test_a_failed_runner_is_a_fault_for_every_server_and_status_1(serving: Callable[..., Serving]) -> None:
    server = serving(fail=lambda plan, work: {}[work.row])
    assert server.run(Submit("a", [4], SamplingParams(max_tokens=9))) == 1
    assert "KeyError" in server.client.until(Fault).message


def test_a_broken_invariant_drains_and_ends_with_a_fault(serving: Callable[..., Serving]) -> None:
    server = serving()
    server.harness.cache._pools[0].take(1)  # a block nobody holds; found when the engine is idle
    assert server.run() == 1
    assert "broken invariant" in server.client.until(Fault).message


def test_a_deadline_is_kept_while_nothing_else_happens(serving: Callable[..., Serving]) -> None:
    server = serving()
    submit = Submit("a", [4], SamplingParams(max_tokens=9), deadline_in_ns=50_000_000)
    server.run(Pause("x"), submit, Pause("a"), Control("drain"))
    assert server.client.complete("a")[1].reason == "deadline"


def test_a_start_that_fails_is_said_in_one_line_with_status_2(
    config: EngineConfig, address: str, tmp_path: Path
) -> None:
    process = start_engine_process(EngineConfig(model=str(tmp_path / "nothing")), address)
    client = Client(address)
    try:
        fault = client.until(Fault)
        assert "nothing" in fault.message and "\n" not in fault.message
        assert process.wait(WAIT_S) == 2
    finally:
        end(process, client)


def test_an_engine_does_not_outlive_its_parent(config: EngineConfig, address: str) -> None:
    """The parent is killed outright, in the middle of a request."""
    code = (
        "import json, sys, time; from steelyard.config import EngineConfig\n"
        "from steelyard.engine.spawn import start_engine_process\n"
        "given = json.loads(sys.argv[1]); p = start_engine_process(EngineConfig(**given['config']), given['address'])\n"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    given = {"address": address, "config": {f: getattr(config, f) for f in ("model", "script", "max_model_len")}}
    parent = subprocess.Popen([sys.executable, "-c", code, json.dumps(given)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    client = Client(address)
    try:
        client.side.send(Submit("a", [4], SamplingParams(ignore_eos=True)))
        client.until(Deltas)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + WAIT_S
        while _is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _is_running(pid)
    finally:
        client.side.close()
        parent.kill()
        if _is_running(pid):
            os.kill(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    """False for a process that is gone or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("line", [b"", b"not json\n", b'{"config": {"dtype": "int3"}, "address": "ipc:///x"}\n', b"[]"])
def test_a_bad_start_line_is_said(line: bytes) -> None:
    with pytest.raises(StartError, match=r"stdin must begin|--dtype"):
        process_module.read_start(line)
