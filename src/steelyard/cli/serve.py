"""`steelyard serve`: starts the engine's process, waits until it can make a token, and serves HTTP in this one.

    bind the port -> open the checkpoint (no weights) -> start the engine -> Ready -> listen, print the address

What can fail fast fails before the engine is started. This process never loads torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import uvloop

from steelyard.checkpoint.entry import Checkpoint
from steelyard.checkpoint.find import open_checkpoint
from steelyard.cli.early import check_early
from steelyard.cli.front import Front, tenants_of
from steelyard.cli.fronts import Fronts
from steelyard.cli.listening import bound, is_public, shown_address
from steelyard.cli.options import add_engine_arguments, engine_config
from steelyard.cli.server_options import add_server_arguments, server_config, with_file
from steelyard.config import EngineConfig, ServerConfig
from steelyard.engine.spawn import start_engine_process
from steelyard.errors import EngineDead, StartError
from steelyard.server.backlog import SocketName
from steelyard.server.client import EngineClient
from steelyard.server.metrics import Metrics
from steelyard.server.tenants import Tenants
from steelyard.wire import logs
from steelyard.wire.channel import ServerSide, new_address, remove_address

LAST_WORDS_S = 0.3
"""After the engine's process has ended: time for what it said last to arrive."""
ENGINE_EXIT_S = 10.0
FORCED_EXIT_S = 0.5
"""The same after a second signal."""

log = logging.getLogger("steelyard.serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add_server_arguments(parser)
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="devices of one engine: 1 (more is planned by `steelyard plan` only)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Raises StartError with one line on why a start failed."""
    args = with_file(args, add_arguments)
    http = server_config(args)
    if (num_devices := getattr(args, "tensor_parallel_size", 1)) != 1:
        raise StartError(
            f"--tensor-parallel-size {num_devices}: an engine runs on one device here; start one server a device, "
            "each with its CUDA_VISIBLE_DEVICES, behind a load balancer"
        )
    logs.set_up(http.log_format)
    config = engine_config(args)
    tenants = tenants_of(http)
    if not tenants.open:  # it means "read them again", and is heard once somebody serves
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    check_early(http)
    with ExitStack() as stack:
        sockets = [stack.enter_context(sock) for sock in bound(http)]
        checkpoint = open_checkpoint(config.model, "dummy" if config.script else config.load_format)
        if tenants.open and is_public(http):
            log.warning("anybody who reaches %s may use this server: give it --tenants or --api-key-file", http.host)
        return uvloop.run(_Serving(http, config, checkpoint, sockets, tenants).run())


class _Serving:
    """One run of the command: an engine process, a channel to it, and HTTP, here or in several front ends."""

    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig,
        checkpoint: Checkpoint,
        sockets: Sequence[socket.socket],
        tenants: Tenants,
    ) -> None:
        self._tenants = tenants
        self._config = config
        self._engine_config = engine_config
        self._checkpoint = checkpoint
        self._sockets = sockets
        self._front: Front | None = None
        self._fronts: Fronts | None = None
        self._is_ready = False
        self._name = None if config.uds is None else SocketName.of(config.uds)
        if config.api_server_count == 1:
            self._front = Front(config, engine_config, checkpoint, tenants)

    async def run(self) -> int:
        address = new_address()
        process = start_engine_process(self._engine_config, address, self._config.log_format)
        side = ServerSide(address)
        if self._front is not None:
            client = self._front.client(side)
        else:
            client = EngineClient(side.send, time.monotonic_ns, self._config.stall_limit_s, Metrics())
        try:
            side.start(client.on_messages)
            _watch(process, lambda exit_code: self._engine_ended(client, exit_code))
            await self._wait_until_ready(client)
            exit_code = await self._serve(client, address)
        finally:
            client.control("halt")
            side.close()
            if not self._is_ready:  # it hears nothing before it is; what it was loading is nobody's
                process.terminate()
            at_once = self._forced
            was_stuck = await asyncio.to_thread(_end, process, FORCED_EXIT_S if at_once else ENGINE_EXIT_S)
            remove_address(address)
            if self._name is not None:
                self._name.unlink()
        return 1 if was_stuck and not at_once else exit_code

    @property
    def _forced(self) -> bool:
        if self._fronts is not None:
            return self._fronts.force_exit
        return self._front is not None and self._front.server is not None and self._front.server.force_exit

    async def _wait_until_ready(self, client: EngineClient) -> None:
        """Raises StartError with what the engine said if it cannot start. SIGTERM ends the wait.

        Its handler stays until those who serve put theirs in its place.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        terminated = asyncio.Event()

        def terminate() -> None:
            terminated.set()
            task.cancel()

        loop.add_signal_handler(signal.SIGTERM, terminate)
        self._say_loading()
        try:
            await client.ready()
        except EngineDead as error:
            raise StartError(error.message) from None
        except asyncio.CancelledError:
            if not terminated.is_set():  # Ctrl-C, which the loop makes a KeyboardInterrupt of
                raise
            raise StartError("stopped while the model was loading") from None
        self._is_ready = True

    def _say_loading(self) -> None:
        """To whoever waits at a terminal; where lines are JSON, one of the log."""
        if self._config.log_format == "json":
            log.setLevel(logging.INFO)
            log.info("loading %s", self._checkpoint.name)
            return
        with suppress(OSError):  # a full disk behind stderr is no reason not to serve
            print(f"steelyard: loading {self._checkpoint.name}", file=sys.stderr, flush=True)

    async def _serve(self, client: EngineClient, address: str) -> int:
        if self._front is not None:
            return await self._front.serve(client, self._sockets[0], self._say_where)
        self._fronts = Fronts(self._config, self._engine_config, self._sockets, address, self._tenants)
        return await self._fronts.run(self._say_where)

    def _engine_ended(self, client: EngineClient, exit_code: int) -> None:
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with status {exit_code}"
        why = client.death or f"the engine's process {how}; its log says more"
        if self._fronts is not None:
            self._fronts.engine_died(why, exit_code)
        elif self._front is not None and self._front.server is not None:
            self._front.server.engine_died(why, exit_code)
        else:
            client.died(why)

    def _say_where(self) -> None:
        """The address, and a command that works when pasted."""
        where, url = shown_address(self._config, self._sockets[0])
        key = "" if self._tenants.open else " -H 'Authorization: Bearer KEY'"
        name = self._config.served_model_name or self._checkpoint.name
        if self._engine_config.skip_tokenizer_init:
            path, body = "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 8}
        elif self._checkpoint.chat_template is None:
            path, body = "/v1/completions", {"prompt": "The sea is", "max_tokens": 40}
        else:
            message = {"role": "user", "content": "What is the capital of France?"}
            path, body = "/v1/chat/completions", {"messages": [message], "max_tokens": 40}
        print(f"steelyard: {name} on {where}\n\n    curl {url}{path}{key} -H 'Content-Type: application/json' \\")
        print(f"      -d '{json.dumps(body)}'\n", flush=True)


def _watch(process: subprocess.Popen[bytes], ended: Callable[[int], None]) -> None:
    """Call `ended(exit code)` on this loop soon after the process has ended."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        exit_code = process.wait()
        try:
            loop.call_soon_threadsafe(loop.call_later, LAST_WORDS_S, ended, exit_code)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            return

    threading.Thread(target=wait, name="engine-watch", daemon=True).start()


def _end(process: subprocess.Popen[bytes], patience_s: float) -> bool:
    """Wait for a halted engine; True if it was stuck and had to be killed. Closing its stdin ends it in any case."""
    was_stuck = False
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        was_stuck = True
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
    return was_stuck
