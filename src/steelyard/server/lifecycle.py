"""Running the application: signals, the drain, and the engine's death. uvicorn does the HTTP.

    first signal   draining: /health 503, new requests 503, what runs goes on      }  exit 0
    all answered, or --shutdown-timeout: what is left gets an error                }
    last call      who is in the socket's queue gets 503, nobody new gets in; close   }
    second signal  close at once
    engine died    requests get an error, /health 503 for a moment, then close        exit 1

The socket stays open while draining, so that a load balancer reads 503 and not a refused connection; answers end their
connections then. A connection is answered, or refused where it connects: none is reset after it was made.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from steelyard.server.backlog import SocketName, has_queued, turn_away
from steelyard.server.connection import BoundedHttp, HeadLimits
from steelyard.server.errors import ShuttingDown
from steelyard.server.service import Service, log

DEATH_NOTICE_S = 1.0
"""How long a server whose engine has died still answers, so that health checks and clients hear why."""
LAST_CALL_S = 1.0
"""How long a connection that was made may take to send its request before the socket is closed."""
_TICK_S = 0.05
_SHORT_S = 0.005
_CLOSE_S = 2.0


class DrainingServer(uvicorn.Server):
    """uvicorn's server with our drain before its own, and an exit status of ours."""

    def __init__(self, app: ASGIApp, service: Service, on_listening: Callable[[], None]) -> None:
        config = service.config
        limits = HeadLimits(config.max_header_bytes, config.max_header_count, config.header_timeout_s)
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=partial(BoundedHttp, limits=limits),  # type: ignore[arg-type]
                root_path=config.root_path,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(_CLOSE_S),
            )
        )
        self._service = service
        self._on_listening = on_listening
        self._num_signals = 0
        self._failed = False
        self._names: dict[socket.socket, SocketName | None] = {}

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The loop's handlers instead of uvicorn's: they take the place of those of the start, and none is lost
        between the two. They stay, for a signal that comes while the engine ends."""
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for sig in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(sig, self.handle_exit, sig, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signals are not raised again after the drain: a drained server exits 0."""
        self._num_signals += 1
        self._service.draining = True
        self.should_exit = True
        if self._num_signals > 1:
            self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for sock in sockets or []:
            self._names[sock] = SocketName.of(sock.getsockname()) if sock.family == socket.AF_UNIX else None
        await super().startup(sockets)
        if self._service.client.death is None:
            self._on_listening()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls it ten times a second."""
        self._service.client.watch()
        return await super().on_tick(counter)

    def engine_died(self, why: str, exit_code: int) -> None:
        """Tell every client, and stop after a moment. An engine that drained with us has not failed."""
        self._service.client.died(why)
        if self._service.draining and exit_code == 0:
            return
        self._failed = True
        log.error("%s", why)
        asyncio.get_running_loop().call_later(DEATH_NOTICE_S, self._stop)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._drain()
        await self._last_call(sockets or [])
        await super().shutdown(sockets)

    @property
    def exit_code(self) -> int:
        return 1 if self._failed else 0

    def _stop(self) -> None:
        self.should_exit = True

    async def _last_call(self, sockets: list[socket.socket]) -> None:
        """Let nobody new in, and wait until the loop has accepted and answered who was."""
        for sock in sockets:
            turn_away(sock, self._names.get(sock))
        deadline_ns = self._service.clock_ns() + int(LAST_CALL_S * 1e9)
        while not self.force_exit and self._service.clock_ns() < deadline_ns:
            if not any(has_queued(sock) for sock in sockets) and not self._num_unanswered():
                return
            await asyncio.sleep(_SHORT_S)

    def _num_unanswered(self) -> int:
        """Connections whose first request is not there yet, or not answered."""
        cycles = [getattr(connection, "cycle", None) for connection in self.server_state.connections]
        return sum(cycle is None or not cycle.response_complete for cycle in cycles)

    async def _drain(self) -> None:
        service = self._service
        service.draining = True
        if service.num_in_flight and self._num_signals == 1:
            log.warning(
                "draining: %d requests are answered first, within %g s (--shutdown-timeout); a second signal ends them",
                *(service.num_in_flight, service.config.shutdown_timeout_s),
            )
        deadline_ns = service.clock_ns() + int(service.config.shutdown_timeout_s * 1e9)
        while service.num_in_flight and not self.force_exit and service.clock_ns() < deadline_ns:
            await asyncio.sleep(_TICK_S)
        if service.num_in_flight:
            log.warning("%d requests were cut off by the shutdown", service.num_in_flight)
            service.client.fail_all(ShuttingDown("the server shut down before this request was finished"))
            await asyncio.sleep(_TICK_S)
