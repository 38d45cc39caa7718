"""The channel under good and bad peers: nothing a peer does blocks or ends the other side."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from steelyard.core.sampling import SamplingParams
from steelyard.errors import EngineDead, StartError
from steelyard.wire import channel as channel_module
from steelyard.wire.channel import Codec, EngineSide, ServerSide, new_address, remove_address
from steelyard.wire.messages import (
    Answer,
    Ask,
    Control,
    Delta,
    Deltas,
    Finished,
    FromEngine,
    Logprob,
    Pause,
    Ready,
    Refused,
    Resume,
    Status,
    Stop,
    Submit,
    ToEngine,
    Usage,
)
from tests.wire.threaded import ThreadedSide

WAIT_MS = 5000

SUBMIT = Submit(
    "a",
    [1, 2, 3],
    SamplingParams(n=2, seed=2**64 - 1, stop=("x",), logit_bias=((5, -1.5),), temperature=0.5),
    b"\x00ns",
    "tenant",
    -3,
    [b"h" * 32],
    10**12,
)
TO_ENGINE: list[ToEngine] = [
    SUBMIT,
    Stop("a", -1, "abort", 3),
    Pause("a"),
    Resume("a"),
    Ask("q", "stats"),
    Control("drop_cache", b"ns"),
]
READY = Ready("m", "f" * 8, "bf16/16", 16, [10], 64, 64, 4, 128, 100, True, {"block_size": 16})
FROM_ENGINE: list[FromEngine] = [
    READY,
    Refused("a", 400, "invalid_value", "no", "prompt", 1.5),
    Deltas([Delta("a", 0, [1, 2], [Logprob(-0.5, [(1, -0.5), (2, -1.0)]), Logprob(-1.0)]), Delta("b", 1, [])]),
    Finished("a", 0, "stop", Usage(3, 2, 0), {"prefill": 5}, stop_token=2, prompt_logprobs=[Logprob(0.0)]),
    Status(1, 0, 0, {"wait_kv": 1}, 10, 5, 3, 2, {"tokens": 4}, False, 0, ""),
    Answer("q", {"nested": [1, {"x": None}]}),
]


@pytest.fixture
def address() -> Iterator[str]:
    made = new_address()
    yield made
    remove_address(made)


@pytest.fixture
def engine(address: str) -> Iterator[EngineSide]:
    side = EngineSide(address)
    yield side
    side.close()


def raw_peer(address: str) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return context, socket


def test_every_message_survives_the_codec() -> None:
    codec = Codec()
    assert [codec.to_engine(codec.encode(m)) for m in TO_ENGINE] == TO_ENGINE
    assert [codec.from_engine(codec.encode(m)) for m in FROM_ENGINE] == FROM_ENGINE


def test_damaged_bytes_are_dropped_and_never_raise(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    codec, rng = Codec(), random.Random(1)
    frames = [codec.encode(m) for m in [*TO_ENGINE, *FROM_ENGINE]]
    dropped = 0
    for _ in range(3000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        cut = bytes(frame[: rng.randint(0, len(frame))]) if rng.random() < 0.3 else bytes(frame)
        dropped += (codec.to_engine(cut) is None) + (codec.from_engine(cut) is None)
    assert dropped > 1000


def test_values_out_of_range_and_deep_nesting_are_dropped() -> None:
    codec = Codec()
    hot = msgspec.msgpack.encode(["Submit", "a", [1], {"temperature": 99.0}])
    assert codec.to_engine(hot) is None
    assert codec.from_engine(b"\x93\xa6Answer\xa1q" + b"\x91" * 100_000 + b"\xc0") is None


class Collector:
    """A server's end whose messages go into a queue."""

    def __init__(self, address: str) -> None:
        self._queue: queue.Queue[FromEngine] = queue.Queue()
        self.side = ThreadedSide(address, lambda batch: [self._queue.put(m) for m in batch] and None)

    def take(self, want: int) -> list[FromEngine]:
        return [self._queue.get(timeout=WAIT_MS / 1000) for _ in range(want)]


def _recv_until(engine: EngineSide, want: int) -> list[tuple[bytes, ToEngine]]:
    got: list[tuple[bytes, ToEngine]] = []
    while len(got) < want:
        fresh = engine.recv(WAIT_MS)
        got += [(peer, message) for peer, message, _ in fresh]
        if not fresh and not engine.peers:
            break
    return got


def test_a_server_is_greeted_and_messages_pass_both_ways_in_order(engine: EngineSide, address: str) -> None:
    server = Collector(address)
    for message in TO_ENGINE:
        server.side.send(message)
    engine.greet(READY)
    received = _recv_until(engine, len(TO_ENGINE))
    assert [m for _, m in received] == TO_ENGINE
    peer = received[0][0]
    assert all(engine.send(peer, m) for m in FROM_ENGINE)
    assert server.take(len(FROM_ENGINE) + 1) == [READY, *FROM_ENGINE]
    server.side.close()
    server.side.close()
    with pytest.raises(EngineDead):
        server.side.send(Pause("a"))


def test_each_message_is_stamped_when_it_comes_though_the_engine_neither_receives_nor_waits(address: str) -> None:
    now_ns = 0

    def clock_ns() -> int:
        stamped.release()
        return now_ns

    stamped = threading.Semaphore(0)
    engine = EngineSide(address, clock_ns)
    server = Collector(address)
    assert stamped.acquire(timeout=WAIT_MS / 1000)  # the connection's own empty message
    for now_ns in (100, 200, 300):
        server.side.send(Pause(str(now_ns)))
        assert stamped.acquire(timeout=WAIT_MS / 1000)
    now_ns = 1000
    received = engine.recv()
    assert [(message, arrived_ns) for _, message, arrived_ns in received] == [
        (Pause(str(t)), t) for t in (100, 200, 300)
    ]
    server.side.close()
    engine.close()


def test_what_comes_while_the_engine_sends_is_received_in_order(engine: EngineSide, address: str) -> None:
    """Each use of the socket may use up the sign of a message; none may be left lying."""
    server = Collector(address)
    server.side.send(Pause("first"))
    ((peer, _),) = _recv_until(engine, 1)
    for number in range(300):
        server.side.send(Pause(str(number)))
        engine.send(peer, Answer(str(number), None))
    assert [m for _, m in _recv_until(engine, 300)] == [Pause(str(number)) for number in range(300)]
    assert server.take(300) == [Answer(str(number), None) for number in range(300)]
    server.side.close()


def test_messages_reach_a_real_event_loop(engine: EngineSide, address: str) -> None:
    async def main() -> list[FromEngine]:
        got: asyncio.Queue[FromEngine] = asyncio.Queue()
        side = ServerSide(address)
        side.start(lambda batch: [got.put_nowait(m) for m in batch] and None)
        side.send(Pause("x"))
        await asyncio.to_thread(_recv_until, engine, 1)
        engine.greet(READY)
        first = await asyncio.wait_for(got.get(), WAIT_MS / 1000)
        side.close()
        return [first]

    assert asyncio.run(main()) == [READY]


def test_a_server_that_came_before_the_greeting_gets_it_too(engine: EngineSide, address: str) -> None:
    server = Collector(address)
    while not engine.peers:
        engine.recv(WAIT_MS)
    engine.greet(READY)
    assert server.take(1) == [READY]
    server.side.close()


def test_a_server_that_comes_later_gets_the_latest_report_behind_the_greeting(engine: EngineSide, address: str) -> None:
    engine.greet(READY)
    for message in FROM_ENGINE[:2]:
        engine.report(message)
    server = Collector(address)
    while not engine.peers:
        engine.recv(WAIT_MS)
    assert server.take(2) == [READY, FROM_ENGINE[1]]
    server.side.close()


def test_each_server_gets_its_own_messages_and_the_broadcasts(engine: EngineSide, address: str) -> None:
    servers = [Collector(address) for _ in range(3)]
    for number, server in enumerate(servers):
        server.side.send(Pause(str(number)))
    received = _recv_until(engine, 3)
    for peer, message in received:
        assert isinstance(message, Pause)
        engine.send(peer, Answer(message.id, None))
    engine.broadcast(FROM_ENGINE[4])
    for number, server in enumerate(servers):
        assert server.take(2) == [Answer(str(number), None), FROM_ENGINE[4]]
        server.side.close()


def test_a_killed_peer_neither_blocks_nor_ends_the_engine(engine: EngineSide, address: str) -> None:
    code = (
        "import sys, time; from steelyard.wire.channel import ServerSide; from steelyard.wire.messages import Pause\n"
        "s = ServerSide(sys.argv[1]); s.start(lambda m: None, loop=__import__('asyncio').new_event_loop())\n"
        "s.send(Pause('x')); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, address])
    (peer, message), *_ = _recv_until(engine, 1)
    assert message == Pause("x")
    assert engine.send(peer, Answer("x", 1))
    child.kill()
    child.wait()
    for _ in range(500):
        engine.recv(10)  # the poll lets ZeroMQ notice the closed socket
        if not engine.send(peer, Answer("x", "y" * 1000)):
            break
    assert engine.take_lost() == [peer]
    assert engine.take_lost() == []
    assert not engine.peers
    engine.broadcast(READY)

    server = Collector(address)
    server.side.send(Pause("after"))
    assert [m for _, m in _recv_until(engine, 1)] == [Pause("after")]
    server.side.close()


def test_a_message_to_an_unknown_peer_is_refused_not_lost_in_silence(engine: EngineSide) -> None:
    assert not engine.send(b"nobody", READY)
    engine.peers.add(b"nobody")
    assert not engine.send(b"nobody", READY)
    assert engine.take_lost() == [b"nobody"]


def test_a_peer_that_stops_reading_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNSENT", 4)
    engine = EngineSide(address)
    context, socket = raw_peer(address)
    socket.setsockopt(zmq.RCVHWM, 4)
    socket.disconnect(address)
    socket.connect(address)
    socket.send(Codec().encode(Pause("x")))
    (peer, _), *_ = _recv_until(engine, 1)
    big = Answer("x", "y" * 1_000_000)
    assert not all(engine.send(peer, big) for _ in range(200))
    assert engine.take_lost() == [peer]
    engine.close()
    context.destroy(linger=0)


def test_garbage_from_a_peer_is_logged_and_the_next_message_is_served(
    engine: EngineSide, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    context, socket = raw_peer(address)
    socket.send(b"\xff\x00garbage")
    socket.send(Codec().encode(READY))  # a message, but of the other direction
    socket.send_multipart([b"", b"\x93", Codec().encode(Pause("x"))])
    assert [m for _, m in _recv_until(engine, 1)] == [Pause("x")]
    assert caplog.text.count("malformed") == 3
    context.destroy(linger=0)


def test_garbage_from_an_engine_is_dropped(address: str) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    server = Collector(address)
    peer = router.recv_multipart()[0]
    router.send_multipart([peer, b"\xc1"])
    router.send_multipart([peer, Codec().encode(READY)])
    assert server.take(1) == [READY]
    server.side.close()
    context.destroy(linger=0)


def test_a_last_message_leaves_although_the_server_closes_at_once(engine: EngineSide, address: str) -> None:
    async def main() -> None:
        side = ServerSide(address)
        side.start(lambda messages: None)
        while not engine.peers:
            engine.recv(WAIT_MS)
        side.send(Control("halt"))
        side.close()

    asyncio.run(main())
    assert [m for _, m in _recv_until(engine, 1)] == [Control("halt")]


def test_closing_without_an_engine_does_not_hang(address: str) -> None:
    side = ServerSide(address)
    side.send(SUBMIT)
    side.close()


def test_the_socket_lies_in_a_private_directory_that_is_removed() -> None:
    made = new_address()
    folder = Path(made.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    os.chmod(folder, 0o755)
    with pytest.raises(StartError, match="open to other users"):
        EngineSide(made)
    remove_address(made)
    remove_address(made)
    assert not folder.exists()
    with pytest.raises(StartError, match="no directory"):
        EngineSide(made)


def test_a_temporary_directory_too_long_for_a_socket_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(channel_module.tempfile, "mkdtemp", lambda prefix: str(_made(deep / prefix)))
    with pytest.raises(StartError, match="TMPDIR"):
        new_address()
    assert list(deep.iterdir()) == []


def _made(path: Path) -> Path:
    path.mkdir()
    return path
