"""Requests that hold a row: their records, the row numbers, and the running lists in policy order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from steelyard.core.request import Request
from steelyard.core.step import RowWork, Want

if TYPE_CHECKING:
    from steelyard.scheduler.speculation import Guesser

_by_key = attrgetter("order_key")


class Resident:
    """A request with a row.

    work_in_flight  its part of the latest step that is not committed, or None: optimistic lengths come from here
    room            positions its block tables hold
    known_len       tokens known when it entered: while there are no more, its prefill has not ended
    end_len         length at which it ends; the token at end_len - 1 is never an input
    swapped_at      where its first work begins if it was swapped; else -1
    guesser         how its guesses fare (speculation.py), once it has had occasion
    gap_ns          the gap meter's reading when its current state began
    is_prefill      known tokens are still to be computed beyond the work in flight
    ended           the client has its end; it waits for its last step in flight
    """

    __slots__ = (
        "end_len",
        "ended",
        "epoch",
        "gap_ns",
        "guesser",
        "is_prefill",
        "known_len",
        "order_key",
        "paused",
        "request",
        "room",
        "row",
        "swapped_at",
        "want",
        "work_in_flight",
    )

    def __init__(self, request: Request, row: int, epoch: int) -> None:
        self.request = request
        self.row = row
        self.epoch = epoch
        self.order_key = request.order_key
        self.work_in_flight: RowWork | None = None
        self.room = 0
        self.known_len = len(request.tokens)
        self.end_len = request.prompt_len + request.max_tokens
        self.swapped_at = -1
        self.gap_ns = 0
        self.is_prefill = True
        self.paused = False
        self.ended = False
        self.guesser: Guesser | None = None
        self.want = request.pooling or Want.TOKEN
        if request.sampling.logprobs is not None and not request.pooling:
            self.want |= Want.TOP_LOGPROBS

    @property
    def next_start(self) -> int:
        """The first position not computed by any step, in flight or committed."""
        work = self.work_in_flight
        return self.request.num_computed if work is None else work.start + work.num_new


class Rows:
    """Row numbers 0 .. max_rows - 1, and three lists of residents in policy order: decodes, prefills, paused."""

    def __init__(self, max_rows: int) -> None:
        self.by_row: list[Resident | None] = [None] * max_rows
        self.decodes: list[Resident] = []
        self.prefills: list[Resident] = []
        self.paused: list[Resident] = []
        self.leave: list[int] = []
        self._free = list(range(max_rows - 1, -1, -1))
        self._epochs = [0] * max_rows

    def __iter__(self) -> Iterator[Resident]:
        """Every resident, those that ended and wait for their last step included."""
        return (r for r in self.by_row if r is not None)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Residents that have not ended."""
        return len(self.decodes) + len(self.prefills) + len(self.paused)

    def enter(self, request: Request) -> Resident:
        row = self._free.pop()
        self._epochs[row] += 1
        resident = Resident(request, row, self._epochs[row])
        request.row, request.epoch = row, resident.epoch
        self.by_row[row] = resident
        insort(self.prefills, resident, key=_by_key)
        return resident

    def leave_row(self, resident: Resident) -> None:
        """Free the row; the runner hears of it with the next plan."""
        self.by_row[resident.row] = None
        self._free.append(resident.row)
        self.leave.append(resident.row)
        resident.request.row = -1

    def promote(self, resident: Resident) -> None:
        """All known tokens are computed or in flight: from now on it decodes."""
        self.unlist(resident)
        resident.is_prefill = False
        insort(self.decodes, resident, key=_by_key)

    def set_paused(self, resident: Resident, paused: bool) -> None:
        self.unlist(resident)
        resident.paused = paused
        insort(self._list_of(resident), resident, key=_by_key)

    def unlist(self, resident: Resident) -> None:
        """Take it from the running lists; its row stays."""
        items = self._list_of(resident)
        at = bisect_left(items, resident.order_key, key=_by_key)
        assert items[at] is resident
        del items[at]

    def sort(self) -> None:
        """Order keys of requests have changed."""
        for items in (self.decodes, self.prefills, self.paused):
            for resident in items:
                resident.order_key = resident.request.order_key
            items.sort(key=_by_key)

    def anchor(self) -> Resident | None:
        """The first running request in policy order that is not paused."""
        heads = [items[0] for items in (self.decodes, self.prefills) if items]
        return min(heads, key=_by_key, default=None)

    def _list_of(self, resident: Resident) -> list[Resident]:
        if resident.paused:
            return self.paused
        return self.prefills if resident.is_prefill else self.decodes
