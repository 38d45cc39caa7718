"""A server's end of the channel on an event loop in a thread of its own, for tests that wait on theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from steelyard.wire.channel import ServerSide
from steelyard.wire.messages import FromEngine, ToEngine


class ThreadedSide:
    """Calls are handed to the loop and waited for; `deliver` is called there."""

    def __init__(self, address: str, deliver: Callable[[list[FromEngine]], None]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._side: ServerSide = self._call(ServerSide, address)
        self._call(self._side.start, deliver, self._loop)

    def send(self, message: ToEngine) -> None:
        if self._thread.is_alive():
            self._call(self._side.send, message)
        else:
            self._side.send(message)

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._side.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._side.close()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def call() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(60)
