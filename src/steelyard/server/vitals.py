"""Whether a living engine makes progress, from what it says by itself: it costs no token to find out.

nothing heard for the stall limit          stopped, or stuck beyond help
one step longer than the step limit        a pulse says so; a step may take long where nothing else may
no step made progress for the stall limit  by its own `Status`
"""

from __future__ import annotations

from collections.abc import Callable

from steelyard.wire.messages import Status

_NS = 1_000_000_000


class Vitals:
    """Of one engine. `status` is its last, None before the first; `step_ns`: how long it has been in one step."""

    def __init__(self, clock_ns: Callable[[], int], stall_limit_s: float, step_limit_s: float) -> None:
        self._clock_ns = clock_ns
        self._stall_limit_ns = int(stall_limit_s * _NS)
        self._step_limit_ns = int(step_limit_s * _NS)
        self.heard_ns = clock_ns()
        self.step_ns = 0
        self.status: Status | None = None

    def reported(self, status: Status) -> None:
        """Said between steps."""
        self.status, self.step_ns = status, 0

    def stuck(self) -> str | None:
        """Why no token is made, or None."""
        silent_ns = self._clock_ns() - self.heard_ns
        if silent_ns > self._stall_limit_ns:
            return f"the engine has said nothing for {silent_ns / _NS:.1f} s"
        if self.step_ns > self._step_limit_ns:
            return f"one step has run for {self.step_ns / _NS:.1f} s"
        status = self.status
        if status is not None and status.stalled_ns > self._stall_limit_ns:
            reason = f"no step made progress for {status.stalled_ns / _NS:.1f} s"
            return f"{reason}: {status.detail}" if status.detail else reason
        return None
