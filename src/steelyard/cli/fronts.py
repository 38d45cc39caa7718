"""Several HTTP front ends on one address, started, watched and stopped by the process that started the engine.

    socket 0 .. N-1, bound to one port --inherited--> front end 0 .. N-1 ==wire==> one engine
    a front end dies: its requests are stopped in the engine, its share of all limits is given back, and it is
    started again on its socket, whose waiting connections it finds; too many deaths in a row end the server

Each connection goes to one front end, chosen by the kernel (SO_REUSEPORT; a UNIX socket is shared).
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from steelyard.cli.front import Place, read_again
from steelyard.config import EngineConfig, ServerConfig
from steelyard.server.siblings import Hub
from steelyard.server.tenants import Tenants
from steelyard.server.usage import SharedUsage

MAX_DEATHS = 3
DEATHS_WITHIN_S = 60.0
_STOP_GRACE_S = 10.0
_POLL_S = 0.05

log = logging.getLogger("steelyard.serve")


class Fronts:
    """N front ends over the engine at `address`, beside whose socket they keep theirs."""

    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig,
        sockets: Sequence[socket.socket],
        address: str,
        tenants: Tenants,
    ) -> None:
        folder = Path(address.removeprefix("ipc://")).parent
        self._config = config
        self._engine_config = engine_config
        self._sockets = sockets
        self._address = address
        self._tenants = tenants
        self._paths = {"usage": str(folder / "usage"), "hub": str(folder / "hub")}
        self._usage = SharedUsage(folder / "usage", 0, config.api_server_count)
        self._hub = Hub(self._listens)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._deaths: deque[float] = deque()
        self._listening: set[int] = set()
        self._on_listening: Callable[[], None] | None = None
        self._stopping = False
        self._exit_code = 0
        self.force_exit = False

    async def run(self, on_listening: Callable[[], None]) -> int:
        """Until all have ended, on a signal or because the engine or they have died; returns the exit status."""
        loop = asyncio.get_running_loop()
        self._on_listening = on_listening
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._read_tenants_again)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        await self._hub.open(self._paths["hub"])
        try:
            for index in range(self._config.api_server_count):
                self._start(index)
            while self._running:
                await asyncio.sleep(_POLL_S)
                for index, process in list(self._running.items()):
                    if (code := process.poll()) is not None:
                        self._ended(index, process, code)
        finally:
            self._hub.close()
            for process in self._running.values():
                process.kill()
                process.wait()
        return self._exit_code

    def engine_died(self, why: str, exit_code: int) -> None:
        """Every front end tells its clients, and ends."""
        if not self._stopping or exit_code != 0:
            self._exit_code = 1
            log.error("%s", why)
        self._leave_sockets()
        asyncio.ensure_future(self._hub.tell("engine_died", [why, exit_code]))  # noqa: RUF006
        asyncio.get_running_loop().call_later(_STOP_GRACE_S, self._signal, signal.SIGKILL)

    def _start(self, index: int) -> None:
        sock = self._sockets[index]
        place = Place(index, self._config.api_server_count, sock.fileno(), self._address, **self._paths)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # inherited: a half-made one hears it later
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "steelyard.cli.front"],
                stdin=subprocess.PIPE,
                pass_fds=[sock.fileno()],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.stdin is not None
        start = {
            "place": asdict(place),
            "server": asdict(self._config),
            "engine": asdict(self._engine_config),
            "tenants": self._tenants.plain(),
            "server_key": self._tenants.server_key.hex(),
        }
        self._running[index] = process
        with suppress(BrokenPipeError):  # it has died already, which is noticed where they are watched
            process.stdin.write(json.dumps(start).encode() + b"\n")
            process.stdin.flush()

    def _ended(self, index: int, process: subprocess.Popen[bytes], code: int) -> None:
        del self._running[index]
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # of a start line that was never read
            process.stdin.close()
        self._hub.lost(index)
        self._usage.forget(index)
        if self._stopping:
            if code != -signal.SIGTERM:  # one that had not begun to listen has nothing to drain
                self._exit_code = self._exit_code or code
            return
        now_s = time.monotonic()
        self._deaths.append(now_s)
        while self._deaths[0] < now_s - DEATHS_WITHIN_S:
            self._deaths.popleft()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        if len(self._deaths) > MAX_DEATHS or index not in self._listening:
            log.error("front end %d %s: the server ends", index, how)
            self._exit_code = 1
            self._stop()
            return
        log.error("front end %d %s and is started again", index, how)
        self._listening.discard(index)
        self._start(index)

    def _listens(self, index: int) -> None:
        self._listening.add(index)
        all_listen = len(self._listening) == self._config.api_server_count
        if all_listen and self._on_listening is not None and not self._stopping:
            self._on_listening()
            self._on_listening = None

    def _read_tenants_again(self) -> None:
        """Kept here too: a front end that is started later gets what the others have, and not what is on disk then."""
        tenants = read_again(self._config, self._tenants)
        if tenants is not None:
            self._tenants = tenants
            self._signal(signal.SIGHUP)

    def _stop(self) -> None:
        """A signal to end: the first drains, the second ends at once, as in a server of one process."""
        self.force_exit = self._stopping
        self._leave_sockets()
        self._signal(signal.SIGTERM)

    def _leave_sockets(self) -> None:
        """Nobody is started again: each front end ends its own socket, and new connections go to those that drain."""
        self._stopping = True
        for sock in self._sockets:
            sock.close()

    def _signal(self, signum: int) -> None:
        for process in self._running.values():
            process.send_signal(signum)
