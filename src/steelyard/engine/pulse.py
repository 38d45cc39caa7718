"""A thread that says twice a second that this process runs, and since when its loop is inside a step.

    loop: --step--            --step (a minute)----------------------
    pulse: . . . . . . . . . . step_ns 0.5 s . 1.0 s . 1.5 s ....          a stopped process: no pulse

So a step that takes long is told apart from a process that is stopped, stuck or dead. Its socket is its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from steelyard.wire.channel import PulseSide
from steelyard.wire.messages import Pulse

PERIOD_S = 0.5


class Pulsing:
    """A context: the thread runs while it is entered. `step_since_ns` is written by the loop, 0 outside a step."""

    def __init__(self, address: str, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.step_since_ns = 0
        self._address = address
        self._clock_ns = clock_ns
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Pulsing:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def message(self) -> Pulse:
        since_ns = self.step_since_ns
        return Pulse(self._clock_ns() - since_ns if since_ns else 0)

    def _run(self) -> None:
        side = PulseSide(self._address)
        try:
            while not self._ended.wait(PERIOD_S):
                side.send(self.message())
        finally:
            side.close()
