"""Device idle time as one running total, so that a row's share of it is a difference of two readings.

    commit      launch ======== done  commit        launch ====== done  commit
    |--- gap ----|--- device ns --|--|---- gap -----|--- device ns ---|--|

A row that decodes for a thousand steps is charged once, when it leaves the state: its gap is total(end) - total(begin).
"""

from __future__ import annotations

from collections import deque

from steelyard.core.request import Request
from steelyard.core.timed import State

_COMPUTING = frozenset({State.PREFILL, State.DECODE, State.RECOMPUTE})
_MAX_RECENT = 64


class GapMeter:
    """The total of host time between commits in which the device ran no step."""

    def __init__(self) -> None:
        self._total_ns = 0
        self._commit_ns = 0
        self._recent_ns: deque[int] = deque(maxlen=_MAX_RECENT)

    def commit(self, now_ns: int, device_ns: int) -> None:
        """A step that took `device_ns` was committed at `now_ns`."""
        interval_ns = now_ns - self._commit_ns
        assert interval_ns >= 0, "time went back"
        self._total_ns += max(0, interval_ns - device_ns)
        self._commit_ns = now_ns
        self._recent_ns.append(now_ns)

    def read(self, now_ns: int, device_is_busy: bool) -> int:
        """The total at `now_ns`, between commits; with a step in flight, as of the last commit."""
        return self._total_ns + (0 if device_is_busy else max(0, now_ns - self._commit_ns))

    def since_commit(self, num_back: int, now_ns: int) -> int:
        """Nanoseconds since the commit `num_back` commits ago (1: the last), or the oldest one remembered."""
        if not self._recent_ns:
            return 0
        return now_ns - self._recent_ns[-min(num_back, len(self._recent_ns))]

    @staticmethod
    def settle(request: Request, now_ns: int, gap_ns: int) -> None:
        """Charge `gap_ns` of the time since the last settlement to the gap, the rest to the current state."""
        if request.state in _COMPUTING:
            request.split(now_ns, [(State.ENGINE_GAP, max(0, min(gap_ns, now_ns - request.since_ns)))])
