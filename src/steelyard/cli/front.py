"""One HTTP front end over a channel to the engine: all of `serve`, or one process of several.

    python -m steelyard.cli.front     stdin: one line of JSON (`Place` and configurations), then held open

As a process of its own it shares address and engine with its siblings, and ends when its parent does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from steelyard.checkpoint.entry import Checkpoint
from steelyard.checkpoint.find import open_checkpoint
from steelyard.cli.listening import cannot_listen
from steelyard.config import EngineConfig, ServerConfig
from steelyard.errors import EngineDead, StartError
from steelyard.server.app import create_app, make_service
from steelyard.server.client import EngineClient
from steelyard.server.lifecycle import DrainingServer
from steelyard.server.metrics import Metrics
from steelyard.server.service import Service
from steelyard.server.siblings import Link, join
from steelyard.server.tenants import Tenants, load_tenants, read_keys
from steelyard.server.usage import SharedUsage
from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer
from steelyard.wire import logs
from steelyard.wire.channel import ServerSide

EXIT_ENGINE = 2
"""The engine could not start: the parent has heard why."""
_ORPHANED = 3

log = logging.getLogger("steelyard.serve")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a front end stands among its siblings. fd: its listening socket, inherited; usage, hub: paths."""

    index: int
    count: int
    fd: int
    address: str
    usage: str
    hub: str


class Front:
    """Serves HTTP on one socket. `server` is there once the engine is ready."""

    def __init__(
        self, config: ServerConfig, engine_config: EngineConfig, checkpoint: Checkpoint, tenants: Tenants
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._tenants = tenants
        self._metrics = Metrics()
        logs.count_lost(lambda: self._metrics.lost_lines.add(1, "server"))
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        if not engine_config.skip_tokenizer_init:
            self._tokenizer = Tokenizer.from_checkpoint(checkpoint)
            self._template = ChatTemplate(
                checkpoint.chat_template, self._tokenizer.bos_token, self._tokenizer.eos_token
            )
        self._joined: Link | None = None
        self.server: DrainingServer | None = None

    def client(self, side: ServerSide) -> EngineClient:
        config = self._config
        return EngineClient(side.send, time.monotonic_ns, config.stall_limit_s, self._metrics, config.step_limit_s)

    async def serve(
        self, client: EngineClient, sock: socket.socket, on_listening: Callable[[], None], place: Place | None = None
    ) -> int:
        """Until a signal or the engine's end; returns the exit status. The engine is ready."""
        service = make_service(
            self._config,
            client,
            self._metrics,
            model_name=self._config.served_model_name or self._checkpoint.name,
            tokenizer=self._tokenizer,
            template=self._template,
            eos_token_ids=self._checkpoint.eos_token_ids,
            tenants=self._tenants,
            usage=None if place is None else SharedUsage(Path(place.usage), place.index, place.count),
        )
        if not self._tenants.open:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._read_tenants_again, service)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        self.server = DrainingServer(create_app(service), service, on_listening)
        running = None
        if place is not None:
            self._joined = await join(place.hub, place.index, service, self._told)
            running = asyncio.ensure_future(self._joined.run())
        gc.collect()
        gc.freeze()  # the tokenizer's tables live as long as the process: collections need not look at them again
        try:
            await self.server.serve(sockets=[sock])
        except OSError as error:
            raise cannot_listen(self._config, error) from None
        finally:
            if running is not None:
                running.cancel()
            service.prompts.close()
            service.close()
        return self.server.exit_code

    async def say_listening(self, place: Place) -> None:
        """Tell the hub, which tells people."""
        assert self._joined is not None
        await self._joined.ask("listening", place.index)

    def _told(self, what: str, value: Any) -> None:
        if what == "engine_died" and self.server is not None:
            self.server.engine_died(*value)

    def _read_tenants_again(self, service: Service) -> None:
        """SIGHUP: the files of keys have changed."""
        tenants = read_again(self._config, self._tenants)
        if tenants is not None:
            service.set_tenants(tenants)
            log.warning("the tenants were read again: %s", ", ".join(tenants.all))


def tenants_of(http: ServerConfig, server_key: bytes | None = None) -> Tenants:
    """Of the flags and files. Raises StartError."""
    keys = [*http.api_key, *(read_keys(Path(http.api_key_file)) if http.api_key_file else [])]
    return load_tenants(Path(http.tenants) if http.tenants else None, keys, server_key)


def read_again(http: ServerConfig, before: Tenants) -> Tenants | None:
    """What the files of keys say now, under the same server key. A mistake in them is logged, and changes nothing."""
    if before.open:
        return None
    try:
        tenants = tenants_of(http, before.server_key)
    except StartError as error:
        log.error("the tenants stay as they were: %s", error.message)
        return None
    if tenants.open:
        log.error("the tenants stay as they were: without any key everybody would be an operator")
        return None
    return tenants


async def _run(front: Front, place: Place, sock: socket.socket) -> int:
    side = ServerSide(place.address)
    client = front.client(side)
    told: list[asyncio.Task[None]] = []
    try:
        side.start(client.on_messages)
        await client.ready()

        def listening() -> None:
            told.append(asyncio.get_running_loop().create_task(front.say_listening(place)))

        return await front.serve(client, sock, listening, place)
    except EngineDead:
        return EXIT_ENGINE
    finally:
        side.close()


def main() -> int:
    """Read the start line and serve. SIGHUP is blocked from birth, and heard once there is a handler for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    place = Place(**start["place"])
    server: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in start["server"].items()}
    http, config = ServerConfig(**server), EngineConfig(**start["engine"])
    logs.set_up(http.log_format)
    try:
        checkpoint = open_checkpoint(config.model, "dummy" if config.script else config.load_format)
        front = Front(http, config, checkpoint, Tenants.of_plain(start["tenants"], bytes.fromhex(start["server_key"])))
        with socket.socket(fileno=place.fd) as sock:
            return uvloop.run(_run(front, place, sock))
    except StartError as error:
        log.error("front end %d: %s", place.index, error.message)
        return EXIT_ENGINE


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(_ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
