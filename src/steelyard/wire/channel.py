"""ZeroMQ over a UNIX socket: the engine's end (ROUTER, blocking) and the server's end (DEALER, on its loop).

    server's event loop <--a batch at a time-- DEALER ===ipc=== ROUTER -- the engine's loop; a thread beside it receives
                        <--the last only------ SUB    ===ipc=== PUB    -- another thread

Messages are `wire.messages` structs in msgpack; nothing that arrives is ever executed. What a peer sends can be
dropped, with a line in the log, but neither blocks nor ends the other side. Who answers what is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from steelyard.errors import EngineDead, StartError, SteelyardError
from steelyard.wire.arrivals import MAX_BATCH, Arrivals
from steelyard.wire.messages import FromEngine, ToEngine

Peer = bytes
"""The routing id ZeroMQ gave a connection; a server that reconnects is a new peer."""

MAX_UNSENT = 100_000
"""Messages kept for a connected peer that has stopped reading; one more, and it counts as lost."""

_MAX_PATH_BYTES = 107  # of a UNIX socket's name, set by the kernel

_log = logging.getLogger(__name__)


class Codec:
    """Encoders and decoders of both directions, built once. Not thread-safe: one a thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._to_engine = msgspec.msgpack.Decoder(ToEngine)
        self._from_engine = msgspec.msgpack.Decoder(FromEngine)

    def encode(self, message: ToEngine | FromEngine) -> bytes:
        return self._encoder.encode(message)

    def to_engine(self, frame: bytes) -> ToEngine | None:
        """The message in `frame`, or None (and a log line) if it is none."""
        try:
            return self._to_engine.decode(frame)
        except (msgspec.MsgspecError, SteelyardError, RecursionError, UnicodeDecodeError) as error:
            _log.warning("dropped a malformed message of %d bytes to the engine: %s", len(frame), error)
            return None

    def from_engine(self, frame: bytes) -> FromEngine | None:
        """The message in `frame`, or None (and a log line) if it is none."""
        try:
            return self._from_engine.decode(frame)
        except (msgspec.MsgspecError, SteelyardError, RecursionError, UnicodeDecodeError) as error:
            _log.warning("dropped a malformed message of %d bytes from the engine: %s", len(frame), error)
            return None


def new_address() -> str:
    """A fresh ipc address in a new directory that only this user can enter.

    Raises StartError if the directory for temporary files has too long a name for a socket.
    """
    folder = tempfile.mkdtemp(prefix="steelyard-")
    path = os.path.join(folder, "engine")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        os.rmdir(folder)
        raise StartError(
            f"{folder} is too long for a UNIX socket ({_MAX_PATH_BYTES} bytes): set TMPDIR to a shorter one"
        )
    return f"ipc://{path}"


def remove_address(address: str) -> None:
    """Delete the socket and the directory made by `new_address`; what is gone already is no error."""
    shutil.rmtree(_path_of(address).parent, ignore_errors=True)


def _path_of(address: str) -> Path:
    assert address.startswith("ipc:///"), f"not an ipc address: {address}"
    return Path(address.removeprefix("ipc://"))


class Received(NamedTuple):
    """A message, who sent it, and when it was here, by the receiver's own clock: it may have lain since."""

    peer: Peer
    message: ToEngine
    arrived_ns: int


class EngineSide:
    """Binds `address`; used by one thread, which may wait in `recv`. Any number of servers may connect.

    Raises StartError if the socket's directory is missing, open to other users, or cannot be bound in.
    """

    def __init__(self, address: str, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.address = address
        _check_private(_path_of(address).parent)
        self._codec = Codec()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else a message to a vanished peer is dropped in silence
        self._greeting: FromEngine | None = None
        self._news: FromEngine | None = None
        self._lost: list[Peer] = []
        self.peers: set[Peer] = set()
        self._arrivals = Arrivals(self._socket, clock_ns)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise StartError(f"cannot listen on {address}: {error}") from error
        self._arrivals.start()

    def greet(self, message: FromEngine) -> None:
        """Send `message` to every peer: to those that are here now, and to each that comes later, first thing."""
        self._greeting, self._news = message, None
        self.broadcast(message)

    def report(self, news: FromEngine) -> None:
        """Send `news` to every peer; the latest goes to each that comes later too, behind the greeting."""
        self._news = news
        self.broadcast(news)

    def recv(self, timeout_ms: int | None = 0) -> list[Received]:
        """All that has arrived, waiting up to `timeout_ms` for the first (None: without limit)."""
        received: list[Received] = []
        for (peer, *frames), arrived_ns in self._arrivals.take(None if timeout_ms is None else timeout_ms / 1000):
            self._welcome(peer)
            messages = (message for frame in frames if frame and (message := self._codec.to_engine(frame)))
            received += [Received(peer, message, arrived_ns) for message in messages]
        return received

    def send(self, peer: Peer, message: FromEngine) -> bool:
        """Queue `message`, without waiting. False: the peer is gone (or stopped reading), and `take_lost` names it."""
        return self._send_frame(peer, self._codec.encode(message))

    def broadcast(self, message: FromEngine) -> None:
        frame = self._codec.encode(message)
        for peer in list(self.peers):
            self._send_frame(peer, frame)

    def take_lost(self) -> list[Peer]:
        """Peers found gone since the last call; a quiet peer's end is noticed by the next message to it."""
        lost, self._lost = self._lost, []
        return lost

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; unsent messages get `linger_ms` to leave."""
        self._arrivals.close()
        self._context.destroy(linger=linger_ms)

    def _welcome(self, peer: Peer) -> None:
        if peer not in self.peers:
            self.peers.add(peer)
            for message in (self._greeting, self._news):
                if message is not None:
                    self._send_frame(peer, self._codec.encode(message))

    def _send_frame(self, peer: Peer, frame: bytes) -> bool:
        if peer not in self.peers:
            return False
        try:
            with self._arrivals.lock:
                self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
                self._arrivals.look()
        except zmq.ZMQError as error:
            self.peers.discard(peer)
            self._lost.append(peer)
            _log.debug("a server is gone: %s", error)  # who started both says so where it was not to end
            return False
        return True


class PulseSide:
    """Publishes beside `address`, for whoever listens; used by one thread. Raises StartError if it cannot be bound."""

    def __init__(self, address: str) -> None:
        self._codec = Codec()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 1)
        try:
            self._socket.bind(address + _PULSE)
        except zmq.ZMQError as error:
            self.close()
            raise StartError(f"cannot listen on {address}{_PULSE}: {error}") from error

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._codec.encode(message))

    def close(self) -> None:
        self._context.destroy(linger=0)


class ServerSide:
    """Connects to an engine. Used on one thread only, that of the loop given to `start`, which it never holds up.

    Connecting waits for nothing: messages sent before the engine listens are kept. That the engine's process has
    died is not seen here (a killed peer is silent in ZeroMQ): watch the process.
    """

    def __init__(self, address: str) -> None:
        self._codec = Codec()
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVHWM, 0)
        self._dealer.setsockopt(zmq.SNDHWM, 0)  # the server bounds its requests in flight
        self._dealer.setsockopt(zmq.PROBE_ROUTER, 1)  # an empty frame at each connection: the engine greets
        self._dealer.connect(address)
        self._pulse = self._context.socket(zmq.SUB)
        self._pulse.setsockopt(zmq.LINGER, 0)
        self._pulse.setsockopt(zmq.CONFLATE, 1)
        self._pulse.setsockopt(zmq.SUBSCRIBE, b"")
        self._pulse.connect(address + _PULSE)
        self._deliver: Callable[[list[FromEngine]], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        self._closed = False

    def start(self, deliver: Callable[[list[FromEngine]], None], loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Call `deliver(messages)` in `loop` (default: the running one) for every batch that arrives, in order."""
        assert self._loop is None, "started twice"
        self._deliver = deliver
        self._loop = loop if loop is not None else asyncio.get_running_loop()
        self._loop.add_reader(self._option(self._dealer, zmq.FD), self._read)
        self._loop.add_reader(self._option(self._pulse, zmq.FD), self._read_pulse)
        self._read_pulse()
        self._look()

    def send(self, message: ToEngine) -> None:
        """Queue `message`, without waiting. Raises EngineDead after `close`."""
        if self._closed:
            raise EngineDead("the channel to the engine is closed")
        self._dealer.send(self._codec.encode(message))
        self._look()

    def close(self) -> None:
        """Close the socket. Idempotent. What was sent just before leaves still."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._option(self._dealer, zmq.FD))
            self._loop.remove_reader(self._option(self._pulse, zmq.FD))
        self._pulse.close()
        self._dealer.close(linger=_FAREWELL_MS)
        self._context.term()

    @staticmethod
    def _option(socket: zmq.Socket[bytes], option: int) -> int:
        value = socket.getsockopt(option)
        assert isinstance(value, int)
        return value

    def _look(self) -> None:
        """ZeroMQ's descriptor tells of a change once, and any call may use that up: read soon if there is something."""
        if self._loop is not None and not self._is_due and self._option(self._dealer, zmq.EVENTS) & zmq.POLLIN:
            self._is_due = True
            self._loop.call_soon(self._read)

    def _read_pulse(self) -> None:
        while not self._closed and self._option(self._pulse, zmq.EVENTS) & zmq.POLLIN:
            message = self._codec.from_engine(self._pulse.recv(zmq.NOBLOCK))
            if message is not None and self._deliver is not None:
                self._deliver([message])

    def _read(self) -> None:
        self._is_due = False
        if self._closed:
            return
        assert self._deliver is not None
        batch: list[FromEngine] = []
        for _ in range(MAX_BATCH):
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._codec.from_engine(frame)
            if message is not None:
                batch.append(message)
        try:
            if batch:
                self._deliver(batch)
        finally:
            if not self._closed:
                self._look()


_PULSE = "-pulse"
_FAREWELL_MS = 200  # for the last Stop or Control to leave when the server closes; an engine that is gone costs no more


def _check_private(folder: Path) -> None:
    try:
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        raise StartError(f"no directory for the engine's socket: {error}") from error
    if mode & 0o077:
        raise StartError(f"{folder} is open to other users (mode {mode:o}): the engine's socket needs mode 700")
