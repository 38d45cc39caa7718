"""Ctrl-C in a process that is a command's own: when it is heeded, and that the process ends with its own status.

imports     afterwards: libraries swallow a KeyboardInterrupt there, and C++ that they call takes it for the end
the run     at once, wherever it is; a command with an event loop has Python's own handler, which loops look for
leaving     at once, by the exit status: nobody is left to catch a KeyboardInterrupt
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and SIGINT."""
_AGAIN_S = 0.01


class Interrupts:
    """Of this process, if `is_ours`; otherwise whoever called keeps its handler, as one does that ignores SIGINT."""

    def __init__(self, is_ours: bool) -> None:
        self._is_ours = is_ours and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # as behind `nohup` and `&`
        self._is_late = False

    def hear(self) -> None:
        """From the first moment on."""
        if self._is_ours:
            signal.signal(signal.SIGINT, self._heed)
            # Called last of all; behind it the interpreter puts C's handler back, which kills.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def run(self, has_loop: bool) -> None:
        """The command begins. Raises the KeyboardInterrupt that came while it was loaded."""
        if self._is_ours and has_loop:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_late:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is to come once more
            raise KeyboardInterrupt

    def leave(self, status: int) -> int:
        """The command has ended; returns the exit status, which is that of a Ctrl-C if one was not heeded any more.

        CPython marks a KeyboardInterrupt that leaves code made from a string, as dataclasses' is, and ends by SIGINT
        though it was caught. Running such code takes the mark away (run_eval_code_obj in Python/pythonrun.c).
        """
        if self._is_ours:
            signal.signal(signal.SIGINT, lambda signum, frame: os._exit(INTERRUPTED))
            exec("")
        return INTERRUPTED if self._is_late else status

    def _heed(self, signum: int, frame: FrameType | None) -> None:
        at = frame
        while at is not None:
            if at.f_code.co_filename.startswith("<frozen importlib"):
                self._is_late = True
                again = threading.Timer(_AGAIN_S, signal.pthread_kill, [threading.main_thread().ident, signum])
                again.daemon = True
                return again.start()
            at = at.f_back
        self._is_late = False
        raise KeyboardInterrupt
