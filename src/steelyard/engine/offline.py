"""Prompts to completion in this process, without sockets: submit all, step until nothing is left."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from steelyard.engine.engine import Engine, EngineFault
from steelyard.errors import InvalidRequest, RequestFailed
from steelyard.wire.messages import FromEngine, Refused, Stop, Submit

_LOOK_AGAIN_S = 0.001


class PromptRefused(InvalidRequest):
    """The engine refused prompt `number` (from 0) for `reason`; nothing was computed."""

    def __init__(self, number: int, refused: Refused) -> None:
        super().__init__(f"prompt {number}: {refused.message}", param=refused.param, code=refused.code)
        self.status = refused.status
        self.number = number
        self.reason = refused.message


def run(engine: Engine, submits: Sequence[Submit]) -> Iterator[list[FromEngine]]:
    """Yield each step's messages; the caller may stop requests in between.

    All are submitted before the first step, so that a bad one is refused before anything is computed. A caller
    that leaves early stops what is left, and the engine can be used again; a Ctrl-C is raised between two steps.
    Raises PromptRefused; RequestFailed if no step can make progress; EngineFault if the runner fails.
    """
    usable = True
    try:
        for number, submit in enumerate(submits):
            answer = engine.submit(submit)
            if isinstance(answer, Refused):
                raise PromptRefused(number, answer)
        while engine.has_work:
            before_ns = engine.clock_ns()  # a batch that this step waited for may have been due since
            with _uninterrupted():
                messages = engine.step()
            is_stuck = not (engine.progressed or messages)
            if is_stuck and engine.next_deadline_ns is None and not engine.grammars.wait():
                status = engine.status()
                if status.running == 0 and engine.scheduler.fills_a_batch(before_ns):
                    time.sleep(_LOOK_AGAIN_S)
                    continue
                raise RequestFailed(f"no step can make progress ({status.running} running, {status.waiting} waiting)")
            yield messages
    except EngineFault:
        usable = False
        raise
    finally:
        if usable:
            _clear(engine, submits)


def _clear(engine: Engine, submits: Sequence[Submit]) -> None:
    for submit in submits:
        if engine.is_live(submit.id):
            engine.stop(Stop(submit.id, -1, "abort"))
    while engine.has_work:
        engine.step()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A Ctrl-C in here is heeded afterwards: half a step would leave the books and the machine apart."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: caught.append((signum, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if caught and callable(before):
        before(*caught[0])
