"""One scheduling pass: decodes, then running prefills, then waiting requests, under one token budget.

    budget  |d|d|d|d|== prefill A ==|= prefill B =|== C, just admitted ==|
             running, policy order                  waiting, policy order

A prefill leaves half of what is left to shorter ones behind it, and takes back what they did not need.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from steelyard.core.step import Copy, RowEnter, RowWork, StepPlan, TableEdit, Want
from steelyard.core.timed import State
from steelyard.scheduler.live import Live, PlannedStep
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.preempting import Preempter
from steelyard.scheduler.protocols import Faults
from steelyard.scheduler.rows import Resident
from steelyard.scheduler.speculation import guess_for


@dataclass(slots=True)
class PlanBuilder:
    """A plan while a pass writes it.

    capped      prefills that gave way to shorter ones: (resident, index into work)
    missed      running residents that get nothing in this step
    pressure    a running request did not get its blocks: nobody is admitted in this pass
    num_drafts  guesses of all its rows together (speculation.py)
    """

    now_ns: int
    budget: int
    work: list[RowWork] = field(default_factory=list)
    enter: list[RowEnter] = field(default_factory=list)
    edits: list[TableEdit] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    states: list[tuple[Resident, State]] = field(default_factory=list)
    finished_prefills: list[Resident] = field(default_factory=list)
    capped: list[tuple[Resident, int]] = field(default_factory=list)
    missed: list[Resident] = field(default_factory=list)
    pressure: bool = False
    num_drafts: int = 0


class Planner:
    """Writes plans over `Live`. Preempts only for running requests, and never the anchor."""

    def __init__(self, live: Live, preempter: Preempter, faults: Faults, options: SchedulerOptions) -> None:
        self._live = live
        self.preempter = preempter
        self._faults = faults
        self._keeps_kv = options.kv_cache
        self._whole_prompts = options.whole_prompts
        self._speculation = options.speculation
        self.draining = False

    def decodes(self, plan: PlanBuilder) -> None:
        """One token for each decoding request whose last token is not in flight already."""
        work, budget = plan.work, plan.budget
        decode = State.DECODE
        most_drafts = self._most_drafts()
        for resident in list(self._live.rows.decodes):
            if plan.pressure and resident.request.row != resident.row:
                continue  # preempted in this pass
            ahead = resident.work_in_flight
            start = resident.request.num_computed if ahead is None else ahead.start + ahead.num_new
            if start + 1 >= resident.end_len:
                continue
            first = start if self._keeps_kv else 0
            num_new = start + 1 - first
            if budget < num_new or self.draining:
                plan.missed.append(resident)
                continue
            if start >= resident.room and not self._make_room(resident, start + 1, plan):
                plan.missed.append(resident)
                continue
            if resident.request.state is not decode:
                plan.states.append((resident, decode))
            num_drafts = source = 0
            if most_drafts and ahead is None:
                num_drafts, source = guess_for(resident, min(most_drafts, budget - num_new))
                num_new += num_drafts
                plan.num_drafts += num_drafts
            resident.work_in_flight = row_work = RowWork(
                resident.row, first, num_new, resident.want, num_drafts, source
            )
            work.append(row_work)
            budget -= num_new
        plan.budget = budget

    def _most_drafts(self) -> int:
        """Guesses for each decode of a step: what its rows leave of the tokens that cost no time."""
        speculation, num_rows = self._speculation, len(self._live.rows.decodes)
        if not speculation.most or not num_rows:
            return 0
        return min(speculation.most, (speculation.load - num_rows) // num_rows)

    def prefills(self, plan: PlanBuilder, shortest_waiting: float) -> None:
        """A chunk for each request whose known tokens are not all computed."""
        prefills = list(self._live.rows.prefills)
        lens = [len(r.request.tokens) - r.next_start for r in prefills]
        for i, resident in enumerate(prefills):
            if plan.pressure and resident.request.row != resident.row:
                continue  # preempted in this pass
            if plan.budget == 0 or self.draining:
                plan.missed.append(resident)
                continue
            shortest = min(min(lens[i + 1 :], default=float("inf")), shortest_waiting)
            num_new = self.share(lens[i], plan.budget, shortest)
            if not num_new:
                plan.missed.append(resident)
                continue
            start = resident.next_start
            num_new = min(num_new, max(1, self._live.cache.reach(resident.request) - start))
            if start + num_new > resident.room and not self._make_room(resident, start + num_new, plan):
                plan.missed.append(resident)
                continue
            self.chunk(resident, start, num_new, plan)

    def share(self, remaining: int, budget: int, shortest_behind: float) -> int:
        """Tokens of `budget` for a prefill that lacks `remaining`; 0 if it must be whole and is too long."""
        if self._whole_prompts:
            return remaining if remaining <= budget else 0
        return share(remaining, budget, shortest_behind)

    def begin(self, resident: Resident, num_new: int, plan: PlanBuilder) -> None:
        """The first work of a request that has just got its row: a chunk, or, where it was swapped, its next token."""
        request = resident.request
        start = request.num_computed
        if not request.is_decoding:
            self.chunk(resident, start, num_new, plan)
            return
        resident.known_len = start
        self._live.rows.promote(resident)
        if start != resident.swapped_at:
            plan.states.append((resident, State.DECODE))
        resident.work_in_flight = RowWork(resident.row, start, 1, resident.want)
        plan.work.append(resident.work_in_flight)
        plan.budget -= 1

    def chunk(self, resident: Resident, start: int, num_new: int, plan: PlanBuilder) -> None:
        """Write a chunk of prefill into the plan; its blocks are there."""
        request = resident.request
        known = len(request.tokens)
        state = State.RECOMPUTE if start < request.recompute_until else State.PREFILL
        if request.state is not state and start != resident.swapped_at:
            plan.states.append((resident, state))
        want = resident.want if start + num_new == known else Want.NOTHING
        if request.sampling.prompt_logprobs is not None and len(request.prompt_logprobs) < request.prompt_len - 1:
            want |= Want.PROMPT_LOGPROBS
        if request.pooling is Want.POOL_MEAN:
            want |= Want.POOL_MEAN
        if start + num_new < known:
            plan.capped.append((resident, len(plan.work)))
        else:
            plan.finished_prefills.append(resident)
        resident.work_in_flight = RowWork(resident.row, start, num_new, want)
        plan.work.append(resident.work_in_flight)
        plan.budget -= num_new

    def top_up(self, plan: PlanBuilder) -> None:
        """Give budget that is left to the prefills that did not get all they need, first in order first."""
        capped, plan.capped = plan.capped, []
        for resident, index in capped:
            old = plan.work[index]
            more = min(plan.budget, len(resident.request.tokens) - old.start - old.num_new)
            more = min(more, resident.room - old.start - old.num_new)
            if more > 0:
                end = old.start + old.num_new + more
                want = old.want
                if end == len(resident.request.tokens):
                    want |= resident.want
                    plan.finished_prefills.append(resident)
                plan.work[index] = resident.work_in_flight = RowWork(old.row, old.start, old.num_new + more, want)
                plan.budget -= more

    def finish(self, plan: PlanBuilder, step_id: int) -> PlannedStep | None:
        """The plan that was built, or None if nothing is to be computed."""
        live, now_ns = self._live, plan.now_ns
        idle = State.RESIDENT_UNSCHEDULED
        plan.states += [(r, idle) for r in (*plan.missed, *live.rows.paused) if r.request.state is not idle]
        if not live.in_flight:
            apply_states(live, plan.states, now_ns)
            plan.states = []
        if not plan.work:
            assert not plan.enter and not plan.copies, "a row without work"
            live.edits += plan.edits
            return None
        for resident in plan.finished_prefills:
            live.rows.promote(resident)
        written = StepPlan(
            id=step_id,
            enter=tuple(plan.enter),
            leave=tuple(live.rows.leave),
            edits=(*live.edits, *plan.edits),
            copies=tuple(plan.copies),
            swaps=live.cache.host.take_swaps(),
            work=tuple(plan.work),
            masked=self._masked(plan) if live.num_with_grammar else (),
            num_drafts=plan.num_drafts,
        )
        live.edits = []
        live.rows.leave.clear()
        swapped, live.swapping = live.swapping, []
        return PlannedStep(
            written, {work.row: work for work in written.work}, plan.states, swapped, filled=plan.finished_prefills
        )

    def _masked(self, plan: PlanBuilder) -> tuple[int, ...]:
        """Rows that sample and are held to a grammar."""
        by_row = self._live.rows.by_row
        sampled = ((work.row, by_row[work.row]) for work in plan.work if Want.TOKEN in work.want)
        return tuple(row for row, resident in sampled if resident is not None and resident.request.has_grammar)

    def _make_room(self, resident: Resident, num_tokens: int, plan: PlanBuilder) -> bool:
        """Blocks for `num_tokens` positions, displacing others if need be and the pipeline is empty."""
        live, request = self._live, resident.request
        if not self._faults.before_allocate(request, num_tokens):
            plan.pressure = True
            return False
        while True:
            edits = live.cache.grow(request, num_tokens)
            if edits is not None:
                plan.edits += edits
                resident.room = live.cache.room(request)
                return True
            plan.pressure = True
            if live.in_flight:
                self.draining = True
                return False
            victim = self.preempter.victim(plan.now_ns)
            if victim is None:
                return False
            self.preempter.displace(victim, plan.now_ns)
            if victim is resident:
                return False


def share(remaining: int, budget: int, shortest_behind: float) -> int:
    """Tokens of `budget` for a prefill that lacks `remaining`, when the shortest one behind it lacks that many."""
    if shortest_behind < remaining:
        return min(remaining, max(budget // 2, 1))
    return min(remaining, budget)


def apply_states(live: Live, states: list[tuple[Resident, State]], now_ns: int) -> None:
    """The step that these rows were planned for begins."""
    for resident, state in states:
        if not resident.ended and resident.request.row == resident.row and resident.request.state is not state:
            live.set_state(resident, state, now_ns)
