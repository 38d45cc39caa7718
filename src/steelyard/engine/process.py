"""The engine in a process of its own: `python -m steelyard.engine.process`, started by engine/spawn.py.

    stdin: one line of JSON, then held open by the parent     stderr: log     stdout: nothing
    0 drained or halted   1 Fault   2 could not start   3 the parent is gone

SIGINT is ignored (a Ctrl-C reaches the whole terminal: the parent decides); SIGTERM drains, a second one halts.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
from types import FrameType

from steelyard.config import EngineConfig
from steelyard.engine.build import build_engine
from steelyard.engine.engine import Engine, EngineFault
from steelyard.engine.pulse import Pulsing
from steelyard.engine.startup import process_age_s
from steelyard.errors import StartError, SteelyardError
from steelyard.wire import logs
from steelyard.wire.channel import EngineSide, Peer
from steelyard.wire.messages import (
    Accepted,
    Ask,
    Control,
    Deltas,
    Fault,
    Finished,
    FromEngine,
    Pause,
    Resume,
    Stop,
    Submit,
    ToEngine,
    Vocabulary,
)

EXIT_FAULT = 1
EXIT_NO_START = 2
EXIT_ORPHANED = 3

STATUS_NS = 100_000_000
RETRY_MS = 10
"""How long to wait for messages when requests are live and no step can be made."""
_LAST_WORDS_MS = 2000

_log = logging.getLogger("steelyard.engine")


class Loop:
    """Joins an engine and a channel: routes messages, reports status, and waits when there is nothing to do."""

    def __init__(self, engine: Engine, channel: EngineSide, pulsing: Pulsing | None = None) -> None:
        self._pulsing = pulsing or Pulsing("")
        self._engine = engine
        self._channel = channel
        self._owners: dict[str, Peer] = {}
        self._status_ns = 0

    def run(self) -> None:
        """Serve until drained or halted. Raises EngineFault if the runner fails."""
        engine, channel = self._engine, self._channel
        channel.greet(engine.ready())
        while not engine.halted and not (engine.draining and not engine.has_work):
            received = channel.recv(self._timeout_ms())
            for item in received:
                self._handle(*item)
            if engine.has_work:
                self._pulsing.step_since_ns = engine.clock_ns()
                messages = engine.step()
                self._pulsing.step_since_ns = 0
                self._route(messages)
            elif not received:
                engine.when_idle()
            self._report()
        self._route(engine.control(Control("halt")))
        channel.broadcast(engine.status())

    def _timeout_ms(self) -> int:
        """No wait while steps are made; else until the next status, deadline or try."""
        engine = self._engine
        if engine.has_work and engine.progressed:
            return 0
        now_ns = engine.clock_ns()
        until_ns = self._status_ns
        if engine.has_work:
            until_ns = min(until_ns, now_ns + RETRY_MS * 1_000_000, engine.next_deadline_ns or until_ns)
        return max(0, -(-(until_ns - now_ns) // 1_000_000))

    def _handle(self, peer: Peer, message: ToEngine, arrived_ns: int) -> None:
        engine = self._engine
        match message:
            case Submit():
                answer = engine.submit(message, arrived_ns)
                if isinstance(answer, Accepted):
                    self._owners[message.id] = peer
                self._channel.send(peer, answer)
            case Ask():
                self._channel.send(peer, engine.ask(message))
            case Vocabulary():
                engine.grammars.set_vocabulary(message.tokenizer_json, message.eos_token_ids)
            case Control():
                _log.info("control: %s", message.what)
                self._route(engine.control(message))
            case Stop() | Pause() | Resume() if self._owners.get(message.id) == peer:
                match message:
                    case Stop():
                        self._route(engine.stop(message))
                    case Pause():
                        engine.pause(message.id)
                    case Resume():
                        engine.resume(message.id)

    def _route(self, messages: list[FromEngine]) -> None:
        """Send each message to the peer that submitted its request. Several choices of one may end together.

        A server that is the only one gets every delta as it is, and knows which requests are its own.
        """
        owners, channel = self._owners, self._channel
        for message in messages:
            if isinstance(message, Deltas) and len(channel.peers) == 1:
                channel.send(next(iter(channel.peers)), message)
            elif isinstance(message, Deltas):
                parts: dict[Peer, Deltas] = {}
                for item in message.items:
                    parts.setdefault(owners[item.id], Deltas([])).items.append(item)
                for peer, part in parts.items():
                    channel.send(peer, part)
            elif isinstance(message, Finished):
                channel.send(owners[message.id], message)
        for message in messages:
            if isinstance(message, Finished) and not self._engine.is_live(message.id):
                owners.pop(message.id, None)

    def _report(self) -> None:
        """Status at its time, and an end to the requests of servers that are gone."""
        now_ns = self._engine.clock_ns()
        if now_ns >= self._status_ns:
            self._status_ns = now_ns + STATUS_NS
            self._channel.report(self._engine.status())
        for peer in self._channel.take_lost():
            for request_id in [id for id, owner in self._owners.items() if owner == peer]:
                self._route(self._engine.stop(Stop(request_id, -1, "disconnect")))


def serve(config: EngineConfig, channel: EngineSide) -> int:
    """Build the engine and run it to its end; returns the exit status. Servers hear of every failure."""
    try:
        engine = build_engine(config, imported_s=process_age_s())
    except SteelyardError as error:
        if not _last_words(channel, error.message):
            _log.error("cannot start: %s", error.message)
        return EXIT_NO_START
    except Exception as error:
        _log.critical("starting failed", exc_info=error)
        _last_words(channel, f"starting failed: {type(error).__name__}: {error}")
        return EXIT_NO_START
    _drain_on_sigterm(engine)
    gc.collect()
    gc.freeze()  # what start-up made lives as long as the process: collections need not look at it again
    try:
        with Pulsing(channel.address, engine.clock_ns) as pulsing:
            Loop(engine, channel, pulsing).run()
    except Exception as error:
        if not isinstance(error, EngineFault):
            _log.critical("the engine's loop failed", exc_info=error)
        _last_words(channel, str(error) if isinstance(error, EngineFault) else f"{type(error).__name__}: {error}")
        return EXIT_FAULT
    if engine.broken:
        _last_words(channel, f"drained after a broken invariant: {engine.broken}")
        return EXIT_FAULT
    channel.close(linger_ms=_LAST_WORDS_MS)
    return 0


def read_start(line: bytes) -> tuple[EngineConfig, str, str]:
    """Configuration, address and form of the log, of stdin's first line. Raises StartError for anything else."""
    try:
        start = json.loads(line)
        return EngineConfig(**start["config"]), str(start["address"]), str(start.get("log_format", "text"))
    except (ValueError, KeyError, TypeError) as error:
        raise StartError(
            f'stdin must begin with {{"address": "ipc://...", "config": {{...}}}} on one line: {error!r}'
        ) from error


def main() -> int:
    """Read the start line, bind, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        config, address, log_format = read_start(sys.stdin.buffer.readline())
        logs.set_up(log_format, logging.INFO)
        threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
        channel = EngineSide(address)
    except StartError as error:
        logs.set_up("text")  # where it is not set up yet
        _log.error("cannot start: %s", error.message)
        return EXIT_NO_START
    return serve(config, channel)


def _exit_with_parent() -> None:
    """The parent holds our stdin open; when it is gone there is nobody to serve and nothing to save."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(EXIT_ORPHANED)


def _drain_on_sigterm(engine: Engine) -> None:
    """The loop looks at these flags at the latest with its next status."""

    def handle(signum: int, frame: FrameType | None) -> None:
        engine.halted = engine.draining
        engine.draining = True

    signal.signal(signal.SIGTERM, handle)


def _last_words(channel: EngineSide, message: str) -> bool:
    """Tell every server, waiting a little for one that is still connecting; whether there was one."""
    channel.greet(Fault(message))
    if not channel.peers:
        channel.recv(_LAST_WORDS_MS)
    was_heard = bool(channel.peers)
    channel.close(linger_ms=_LAST_WORDS_MS)
    return was_heard


if __name__ == "__main__":
    sys.exit(main())
