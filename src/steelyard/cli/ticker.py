"""How far an offline run is, on standard error: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from steelyard.llm import Progress

TERMINAL_S = 0.2
ELSEWHERE_S = 10.0


class Ticker:
    """Told of each step of a run, it writes at most every TERMINAL_S or ELSEWHERE_S seconds."""

    def __init__(self, what: str, out: TextIO | None = None) -> None:
        self._what, self._out = what, out or sys.stderr
        self._live = self._out.isatty()
        self._every_s = TERMINAL_S if self._live else ELSEWHERE_S
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last < self._every_s:
            return
        self._last = now
        done = f"{progress.num_finished}/{progress.num_prompts} done, {progress.num_generated_tokens:,} tokens"
        begin, end = ("\r", "\x1b[K") if self._live else ("", "\n")
        print(f"{begin}{self._what}: {done}", end=end, file=self._out, flush=True)

    def __enter__(self) -> Ticker:
        return self

    def __exit__(self, *error: object) -> None:
        """Clear the line."""
        if self._live:
            print("\r\x1b[K", end="", file=self._out, flush=True)
