"""The step ledger: every step's participants, time and charges, kept for the last few thousand steps.

    commit N-1          launch N ........ commit N
        |------ gap ------|------ device -----|         span = device + gap, and spans follow each other:
                                                        steps + gaps = window, exactly

What happens at every step is arithmetic on arrays; words for people are made when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steelyard.core.step import RowWork, StepPlan, StepTiming, Want
from steelyard.ledger.rates import Fitter, Load, Rates
from steelyard.ledger.step import Ints, Part, Participants, shares

MAX_STEPS = 4096
NO_WORK = "no_work"
CPU_LATE = "cpu_late"
PoolState = tuple[int, int, int]
_ROW, _START, _NEW = map(itemgetter, range(3))
_SAMPLING = frozenset(id(Want(bits)) for bits in range(32) if Want.TOKEN in Want(bits))


class Stay(NamedTuple):
    """A request's time in a row, by ticket. Positions below `known_len` were known when it came."""

    request_id: str
    choice: int
    tenant: str
    row: int
    known_len: int
    again_until: int


class StepEntry(NamedTuple):
    """A step that is over. `shares_ns` and `engine_ns` sum to `device_ns`; that and the gaps to its span.

    gaps_ns  time before the step in which the device ran none, by cause
    pools    (blocks, clean, cached) of each KV group when it was over; empty where nobody told
    """

    id: int
    rows: Participants
    load: Load
    rates: Rates
    launch_ns: int
    commit_ns: int
    device_ns: int
    gaps_ns: dict[str, int]
    shares_ns: Ints
    engine_ns: int
    timing: StepTiming
    pools: tuple[PoolState, ...] = ()

    @property
    def span_ns(self) -> int:
        return self.device_ns + sum(self.gaps_ns.values())


@dataclass(slots=True)
class Totals:
    """Sums over all steps since the start. requests_ns + engine_ns = device_ns."""

    num_steps: int = 0
    device_ns: int = 0
    requests_ns: int = 0
    engine_ns: int = 0
    num_tokens: int = 0
    gaps_ns: dict[str, int] = field(default_factory=dict)


class StepBook:
    """Told of each launch and each commit, in order. `cost_ns` and `num_tokens` are by row, of its present stay."""

    def __init__(self, max_rows: int, start_ns: int) -> None:
        self.entries: deque[StepEntry] = deque(maxlen=MAX_STEPS)
        self.stays: dict[int, Stay] = {}
        self.totals = Totals()
        self.start_ns = start_ns
        self.commit_ns = start_ns
        self.cost_ns = np.zeros(max_rows, np.int64)
        self.num_tokens = np.zeros(max_rows, np.int64)
        self._fitter = Fitter()
        self._tickets = np.zeros(max_rows, np.int64)
        self._known = np.zeros(max_rows, np.int64)
        self._again = np.zeros(max_rows, np.int64)
        self._next_ticket = 1
        self._launched: deque[tuple[int, Ints, Participants]] = deque()
        self._last: tuple[tuple[int, ...], Ints, Participants] | None = None
        self._work_ns = start_ns

    def enter(self, stay: Stay) -> int:
        """A request takes a row; returns its ticket."""
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self.stays[ticket] = stay
        self._tickets[stay.row] = ticket
        self._known[stay.row], self._again[stay.row] = stay.known_len, stay.again_until
        self.cost_ns[stay.row] = self.num_tokens[stay.row] = 0
        return ticket

    def work_came(self, now_ns: int) -> None:
        """There was nothing to do until now."""
        self._work_ns = now_ns

    def launched(self, plan: StepPlan) -> None:
        """After `enter` for each row that enters with this plan."""
        rows, array, found = self._participants(plan)
        self._last = (rows, array, found)
        self._launched.append((plan.id, array, found))

    def committed(self, step_id: int, timing: StepTiming, now_ns: int, pools: Sequence[PoolState] = ()) -> None:
        """Charge the oldest step in flight. Called before the scheduler moves on, with `pools` as the step had them."""
        launched_id, rows, found = self._launched.popleft()
        assert launched_id == step_id, f"step {step_id} is charged, step {launched_id} is due"
        span_ns = now_ns - self.commit_ns
        device_ns = min(timing.device_ns, span_ns)
        gaps_ns = self._gaps(span_ns - device_ns, timing)
        rates = self._fitter.rates
        charged, engine_ns, load = shares(device_ns, found, rates, timing.padded_tokens)
        self.cost_ns[rows] += charged
        self.num_tokens[rows] += 1 if not found.tail else found.num_new
        self.commit_ns = now_ns
        self._fitter.add(load._replace(num_tokens=load.num_tokens + timing.padded_tokens), device_ns)
        self._sum(device_ns, engine_ns, load.num_tokens, gaps_ns)
        sums = (timing.launch_ns, now_ns, device_ns, gaps_ns, charged, engine_ns, timing)
        self.entries.append(StepEntry(step_id, found, load, rates, *sums, tuple(pools)))
        if len(self.stays) > 2 * MAX_STEPS and len(self.entries) == MAX_STEPS:
            self._forget()

    @property
    def rates(self) -> Rates:
        return self._fitter.rates

    def steps_of(self, tickets: Iterable[int]) -> Iterable[tuple[StepEntry, int]]:
        """The kept steps in which one of `tickets` took part, with its place among the participants."""
        wanted = np.array(sorted(tickets), np.int64)
        for entry in self.entries:
            at = np.flatnonzero(np.isin(entry.rows.owners, wanted))
            if len(at):
                yield entry, int(at[0])

    # inside

    def _participants(self, plan: StepPlan) -> tuple[tuple[int, ...], Ints, Participants]:
        last, work = self._last, plan.work
        rows = tuple(map(_ROW, work))
        if last is not None and last[0] == rows and not last[2].tail and not plan.enter and not plan.num_drafts:
            before = last[2]  # every row goes on with one token, as it did before
            return rows, last[1], before._replace(starts=before.starts + 1)
        num_rows = len(rows)
        array = np.fromiter(rows, np.int64, num_rows)
        starts = np.fromiter(map(_START, work), np.int64, num_rows)
        tail = self._tail(work, starts >= self._known[array])
        return rows, array, Participants(self._tickets[array], starts, tail)

    def _tail(self, work: tuple[RowWork, ...], is_decode: NDArray[np.bool_]) -> tuple[Part, ...]:
        """What follows the rows that decode one token, and so draw the next: the scheduler puts those first."""
        lead = len(work)
        while lead and not is_decode[lead - 1]:
            lead -= 1
        if not is_decode[:lead].all() or sum(map(_NEW, work[:lead])) != lead:
            lead = 0
        parts = []
        for (row, start, num_new, want, num_drafts, _), decodes in zip(work[lead:], is_decode[lead:].tolist()):
            again = max(0, min(int(self._again[row]), start + num_new) - start)
            parts.append(Part(start, num_new, decodes, again, (1 + num_drafts) * (id(want) in _SAMPLING)))
        return tuple(parts)

    def _gaps(self, gap_ns: int, timing: StepTiming) -> dict[str, int]:
        """A gap's part before any work was there, and the rest by the runner's cause."""
        idle_ns = min(gap_ns, max(0, self._work_ns - self.commit_ns))
        cause = timing.gap_cause if timing.gap_cause not in ("", NO_WORK) else CPU_LATE
        return {name: part for name, part in ((NO_WORK, idle_ns), (cause, gap_ns - idle_ns)) if part}

    def _sum(self, device_ns: int, engine_ns: int, num_tokens: int, gaps_ns: dict[str, int]) -> None:
        totals = self.totals
        totals.num_steps += 1
        totals.device_ns += device_ns
        totals.engine_ns += engine_ns
        totals.requests_ns += device_ns - engine_ns
        totals.num_tokens += num_tokens
        for cause, part_ns in gaps_ns.items():
            totals.gaps_ns[cause] = totals.gaps_ns.get(cause, 0) + part_ns

    def _forget(self) -> None:
        """Drop the stays that no kept step names and no row holds."""
        held = {int(ticket) for ticket in self._tickets}
        oldest = min(int(entry.rows.owners.min()) for entry in self.entries)
        self.stays = {t: stay for t, stay in self.stays.items() if t >= oldest or t in held}
