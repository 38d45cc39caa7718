"""A clock that moves only when told to."""

from __future__ import annotations


class VirtualClock:
    """Nanoseconds; callable, so that it stands where a real clock's function would."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, amount_ns: int) -> int:
        """Move forward and return the new time."""
        assert amount_ns >= 0, "time does not go back"
        self.now_ns += amount_ns
        return self.now_ns
