"""Takes messages off a ZeroMQ socket the moment they come, whatever its owner is doing, and notes when that was.

    owner    send send [ a step: a second, perhaps ] take -> (when, message), (when, message)
    thread             ^recv      ^recv                      20 us each (benchmarks/wire.py); nothing while none comes

The thread waits for the socket's descriptor, without the interpreter's lock and without touching the socket. Whoever
does touch it holds `lock`: ZeroMQ lets threads share a socket with a full memory barrier between them (zmq_socket(3)).
An owner that runs Python alone is asked for the interpreter's lock, and gives it after 5 ms: as late is the note.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import zmq

MAX_BATCH = 512
"""Messages taken at once, so that a flood cannot keep the engine from its next step."""


class Arrival(NamedTuple):
    """A multipart message, and when it was taken off the socket."""

    frames: list[bytes]
    at_ns: int


class Arrivals:
    """What has come in over `socket`, in order. `start` runs the thread, `close` ends it; then the socket may close."""

    def __init__(self, socket: zmq.Socket[bytes], clock_ns: Callable[[], int]) -> None:
        self.lock = threading.Lock()
        self._socket = socket
        self._clock_ns = clock_ns
        self._queue: SimpleQueue[Arrival] = SimpleQueue()
        self._end_fd, self._ending_fd = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """With the lock held, after each use of the socket: that may have used up what would have woken the thread."""
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[arg-type, operator]
            self._drain()

    def take(self, timeout_s: float | None) -> list[Arrival]:
        """At most MAX_BATCH, waiting up to `timeout_s` for the first (None: without limit)."""
        with self.lock:
            self.look()
        found: list[Arrival] = []
        try:
            if timeout_s is None or timeout_s > 0.0:
                found.append(self._queue.get(timeout=timeout_s))
            while len(found) < MAX_BATCH:
                found.append(self._queue.get_nowait())
        except Empty:
            pass
        return found

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.close(self._ending_fd)  # the other end hangs up, which wakes the thread
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._end_fd)

    def _drain(self) -> None:
        for _ in range(MAX_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._queue.put(Arrival(frames, self._clock_ns()))

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._end_fd, select.POLLHUP)
        poll.register(self._socket.getsockopt(zmq.FD), select.POLLIN)  # type: ignore[arg-type]
        while not self._closed:
            poll.poll()
            with self.lock:
                if not self._closed:
                    self.look()
