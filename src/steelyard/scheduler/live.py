"""Every live request and the moves between its places: waiting, resident, ended but in flight, gone.

    add -> waiting -> enter -> resident -> end -> (last step in flight commits) -> gone
              ^------ preempt ----'        its KV is lost, or kept on the host

Each move keeps request, row, blocks and ledger in step. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from steelyard.cache.manager import CacheManager
from steelyard.core.request import Ended, FinishReason, Request
from steelyard.core.step import RowWork, StepPlan, TableEdit
from steelyard.core.timed import State
from steelyard.scheduler.gaps import GapMeter
from steelyard.scheduler.options import Counters
from steelyard.scheduler.rows import Resident, Rows
from steelyard.scheduler.waiting import WaitingQueue


@dataclass(slots=True)
class PlannedStep:
    """A step that was planned and not committed.

    states   what rows turn to when the step before it commits
    swapped  requests whose KV it moves to the host
    filled   residents whose prefill it ends
    """

    plan: StepPlan
    works: dict[int, RowWork]
    states: list[tuple[Resident, State]] = field(default_factory=list)
    swapped: list[Request] = field(default_factory=list)
    filled: list[Resident] = field(default_factory=list)


class Live:
    """All that changes while requests are served, in one place."""

    def __init__(self, cache: CacheManager, max_rows: int, short_len: int) -> None:
        self.cache = cache
        self.rows = Rows(max_rows)
        self.waiting = WaitingQueue(short_len)
        self.gaps = GapMeter()
        self.counters = Counters()
        self.in_flight: deque[PlannedStep] = deque()
        self.edits: list[TableEdit] = []  # behind windows, for the next plan
        self.swapping: list[Request] = []  # whose KV the next plan moves to the host
        self.requests: dict[str, dict[int, Request]] = {}
        self.paused_ids: set[str] = set()
        self.num_with_grammar = 0

    # lookup

    def get(self, key: tuple[str, int]) -> Request | None:
        return self.requests.get(key[0], {}).get(key[1])

    def resident(self, request: Request) -> Resident | None:
        return self.rows.by_row[request.row] if request.row >= 0 else None

    # moves

    def add(self, request: Request) -> None:
        self.requests.setdefault(request.id, {})[request.index] = request
        self.num_with_grammar += request.has_grammar
        self.waiting.push(request)

    def enter(self, request: Request, now_ns: int, swapped: bool = False) -> Resident:
        """Waiting -> resident. Until the step in flight commits, its time is the engine's gap.

        A swapped request's is the way back, and that of the step which copies its KV.
        """
        self.waiting.remove(request)
        resident = self.rows.enter(request)
        request.to(State.SWAP_IN if swapped else State.ENGINE_GAP, now_ns)
        if swapped:
            resident.swapped_at = request.num_computed
            self.counters.swaps_in += 1
        resident.gap_ns = self.gaps.read(now_ns, bool(self.in_flight))
        return resident

    def preempt(self, resident: Resident, now_ns: int, swap: bool = False) -> None:
        """Resident -> waiting: its blocks go back, its tokens stay. It has no row in flight.

        `swap` keeps its KV on the host, if there is room; else it is computed again.
        """
        assert resident.work_in_flight is None, "preempted with a row in flight"
        request = resident.request
        swapped = swap and self.cache.swap_out(request)
        self.set_state(resident, State.SWAP_OUT if swapped else State.PREEMPTED, now_ns)
        self.rows.unlist(resident)
        self._vacate(resident)
        if swapped:
            self.swapping.append(request)
            self.counters.swaps_out += 1
        else:
            self._lose(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.waiting.push(request)

    def end(self, request: Request, reason: FinishReason, now_ns: int) -> Ended:
        """Any place -> ended. Row and blocks are released now, or when the last step that uses them commits."""
        resident = self.resident(request)
        request.reason = reason
        self._forget(request)
        self._count(reason)
        if resident is None:
            self.waiting.remove(request)
            self.cache.release(request)
            request.to(State.ENDED, now_ns)
        else:
            self.rows.unlist(resident)
            resident.ended = True
            if resident.work_in_flight is None:
                self.set_state(resident, State.ENDED, now_ns)
                self._vacate(resident)
            else:
                self.set_state(resident, State.OVERSHOOT, now_ns)
        return Ended(request, reason)

    def land(self, resident: Resident, num_tokens: int, now_ns: int) -> None:
        """A step with the row of an ended request was committed: what it computed is thrown away."""
        resident.request.num_overshoot += num_tokens
        self.counters.overshoot_tokens += num_tokens
        if resident.work_in_flight is None:
            self.set_state(resident, State.ENDED, now_ns)
            self._vacate(resident)

    def begin_overshoot(self, resident: Resident, num_back: int, now_ns: int) -> None:
        """Its last token that counts was sampled `num_back` commits ago: the time since then is overshoot."""
        request = resident.request
        began_ns = max(request.since_ns, now_ns - self.gaps.since_commit(num_back, now_ns))
        self.settle(resident, began_ns)
        request.to(State.OVERSHOOT, began_ns)

    def set_state(self, resident: Resident, state: State, now_ns: int) -> None:
        """Close the current state of a resident's ledger, device gaps apart, and enter `state`."""
        reading_ns = self.settle(resident, now_ns)
        resident.request.to(state, now_ns)
        resident.gap_ns = reading_ns

    def settle(self, resident: Resident, now_ns: int) -> int:
        """Bring a resident's ledger up to `now_ns`; returns the gap meter's reading."""
        reading_ns = self.gaps.read(now_ns, bool(self.in_flight))
        self.gaps.settle(resident.request, now_ns, reading_ns - resident.gap_ns)
        resident.gap_ns = reading_ns
        return reading_ns

    # inside

    @staticmethod
    def _lose(request: Request) -> None:
        """Its KV is given up: what came of its prompt's positions will come again."""
        request.recompute_until = max(request.num_computed, request.recompute_until)
        if len(request.prompt_logprobs) < request.prompt_len - 1:
            request.prompt_logprobs.clear()
        request.pooled.clear()

    def _vacate(self, resident: Resident) -> None:
        row = resident.row
        if not self.cache.swapped_tokens(resident.request):
            self.cache.release(resident.request)
        self.rows.leave_row(resident)
        if self.edits:
            self.edits = [edit for edit in self.edits if edit.row != row]

    def _forget(self, request: Request) -> None:
        siblings = self.requests[request.id]
        del siblings[request.index]
        self.num_with_grammar -= request.has_grammar
        if not siblings:
            del self.requests[request.id]
            self.paused_ids.discard(request.id)

    def _count(self, reason: FinishReason) -> None:
        name = f"finished_{reason.value}"
        setattr(self.counters, name, getattr(self.counters, name) + 1)
