"""The scheduler: requests in, plans out, results in, events out. Pure: time, cost and policy are passed in.

    schedule(t0) -> plan 1           launch 1
    schedule(t1) -> plan 2           launch 2      (overlap: lengths of plan 1 are taken as if committed)
    commit(result 1, t2) -> events                 tokens appended, full blocks published, ends, releases
    schedule(t3) -> plan 3 ...

At most two steps are in flight with overlap, one without.
"""

from __future__ import annotations

from steelyard.cache.manager import CacheManager
from steelyard.core.request import Event, FinishReason, Request
from steelyard.core.step import RunnerCaps, StepPlan, StepResult
from steelyard.core.timed import State
from steelyard.errors import InvalidRequest
from steelyard.scheduler.admission import bound_of, settle_max_tokens
from steelyard.scheduler.batching.continuous import Continuous
from steelyard.scheduler.checks import check_live
from steelyard.scheduler.committing import Committer
from steelyard.scheduler.joining import Joiner
from steelyard.scheduler.live import Live
from steelyard.scheduler.options import Counters, SchedulerOptions
from steelyard.scheduler.planning import PlanBuilder, Planner
from steelyard.scheduler.policies.fcfs import Fcfs
from steelyard.scheduler.preempting import Preempter
from steelyard.scheduler.protocols import Batching, Cost, Faults, Order


class Scheduler:
    """Owns every request from `add` to its `Ended` event. Not thread-safe: one loop calls it."""

    def __init__(
        self,
        caps: RunnerCaps,
        cache: CacheManager,
        options: SchedulerOptions | None = None,
        *,
        order: Order | None = None,
        batching: Batching | None = None,
        cost: Cost | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.options = options = options or SchedulerOptions()
        self.max_num_seqs = min(caps.max_rows, options.max_num_seqs or caps.max_rows)
        self.max_num_batched_tokens = min(
            caps.max_batched_tokens, options.max_num_batched_tokens or caps.max_batched_tokens
        )
        self.cache = cache
        self.bound = bound_of(cache, self.max_num_batched_tokens, options.whole_prompts)
        self._max_model_len = caps.max_model_len
        self._max_in_flight = 2 if options.overlap else 1
        self._order = order or Fcfs()
        self._batching = batching or Continuous()
        self._cost = cost
        self.faults = faults or Faults()
        self._live = Live(cache, self.max_num_seqs, int(options.short_share * self.max_num_batched_tokens))
        preempter = Preempter(self._live, self._order, cost)
        self._planner = Planner(self._live, preempter, self.faults, options)
        self._joiner = Joiner(self._live, self._planner, self._order, options, self.faults)
        self._committer = Committer(self._live, self.faults)
        self._num_added = 0
        self._next_step_id = 1

    # requests

    def add(self, request: Request, now_ns: int) -> None:
        """Queue a request and make its `max_tokens` definite.

        Raises ContextLengthExceeded, with the numbers, if it can never fit alone, and InvalidRequest for an
        empty prompt or a key in use. A refused request's ledger is closed.
        """
        try:
            if self._live.get(request.key) is not None:
                raise InvalidRequest(f"id: request {request.id!r} is being served already; use another", param="id")
            settle_max_tokens(request, self.bound, self._max_model_len)
        except InvalidRequest:
            request.to(State.ENDED, now_ns)
            raise
        self._num_added += 1
        tenants = self._live.waiting.tenants
        if request.tenant not in tenants:
            self._order.activate(request.tenant, request.weight, tenants.keys())
        request.order_key = (*self._order.key(request, now_ns), self._num_added)
        self._live.add(request)

    def stop(self, key: tuple[str, int], reason: FinishReason, now_ns: int, keep: int = -1) -> list[Event]:
        """End a request in whatever state it is; nothing happens if it has ended or never was.

        keep >= 0 keeps that many generated tokens: what was computed beyond them is overshoot, in tokens and time.
        """
        live = self._live
        request = live.get(key)
        if request is None:
            return []
        num_beyond = request.num_generated - keep if keep >= 0 else 0
        if num_beyond > 0:
            del request.tokens[request.prompt_len + keep :]
            request.num_overshoot += num_beyond
            live.counters.overshoot_tokens += num_beyond
        resident = live.resident(request)
        if keep >= 0 and resident is not None:
            live.begin_overshoot(resident, max(0, num_beyond) + 1, now_ns)
        return [live.end(request, reason, now_ns)]

    def pause(self, request_id: str, now_ns: int) -> None:
        """Compute nothing more for any choice of this request until `resume`; KV stays while there is room."""
        if request_id in self._live.requests:
            self._live.paused_ids.add(request_id)
            self._set_paused(request_id, True, now_ns)

    def resume(self, request_id: str, now_ns: int) -> None:
        self._live.paused_ids.discard(request_id)
        self._set_paused(request_id, False, now_ns)

    # steps

    def schedule(self, now_ns: int) -> StepPlan | None:
        """The next step, or None if there is nothing to launch now. A plan that is returned must be launched."""
        live, planner = self._live, self._planner
        if len(live.in_flight) >= self._max_in_flight or (planner.draining and live.in_flight):
            return None
        planner.draining = False
        self.faults.before_step(self._next_step_id)
        num_running = live.rows.num_running
        if self._order.changes:
            self._sort_again(now_ns)
        if not self._joiner.make_way(now_ns):
            planner.draining = True
            return None
        budget = self._batching.budget(num_running, now_ns, self._cost)
        limit = self.max_num_batched_tokens
        limit = limit if budget is None else min(budget, limit)
        if not self.options.whole_prompts:  # a smaller step would never hold what is not to be computed in parts
            limit = self._order.budget(live.rows.decodes, limit, now_ns)
        plan = PlanBuilder(now_ns, limit)
        waiting = live.waiting.items
        may_join = self._batching.may_join(waiting, num_running, now_ns) if waiting else 0
        planner.decodes(plan)
        planner.prefills(plan, self._joiner.shortest_waiting(may_join))
        if waiting:
            self._joiner.admit(plan, may_join)
        planner.top_up(plan)
        step = planner.finish(plan, self._next_step_id)
        if step is None:
            return None
        live.in_flight.append(step)
        self._next_step_id += 1
        return step.plan

    def commit(self, result: StepResult, now_ns: int) -> list[Event]:
        """Take in the result of the oldest step in flight."""
        return self._committer.commit(result, now_ns)

    @property
    def weighs(self) -> bool:
        """Whether the order is to be told by `charge` what each step cost."""
        return self._order.weighs

    def charge(self, tenant: str, amount_ns: int, num_tokens: int) -> None:
        """A step cost a tenant device time for tokens that were not computed before."""
        self._order.charge(tenant, amount_ns, num_tokens)

    # views

    @property
    def num_running(self) -> int:
        """Requests that hold a row and have not ended."""
        return self._live.rows.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._live.waiting)

    @property
    def in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._live.in_flight)

    @property
    def has_work(self) -> bool:
        """Whether a request is live or a step is in flight."""
        return bool(self._live.requests or self._live.in_flight)

    @property
    def held_slots(self) -> int:
        """Slots of ended members that their batch kept, by step; continuous batching keeps none."""
        return self._batching.held_slots

    def fills_a_batch(self, now_ns: int) -> bool:
        """Whether nobody runs because a batch is still waited for."""
        waiting = self._live.waiting.items
        return bool(waiting) and not self._batching.may_join(waiting, self.num_running, now_ns)

    @property
    def counters(self) -> Counters:
        return self._live.counters

    def waiting_by_reason(self) -> dict[str, int]:
        return self._live.waiting.by_reason()

    def get(self, key: tuple[str, int]) -> Request | None:
        """The live request with this (id, index)."""
        return self._live.get(key)

    def keys(self, request_id: str) -> list[tuple[str, int]]:
        """The keys of all live choices of a request."""
        return [(request_id, index) for index in self._live.requests.get(request_id, {})]

    def request_at(self, row: int) -> Request:
        """The request that holds `row`."""
        resident = self._live.rows.by_row[row]
        assert resident is not None, f"row {row} is free"
        return resident.request

    def residents(self) -> list[Request]:
        """Requests that hold a row and blocks, those that ended and wait for their last step included."""
        return [resident.request for resident in self._live.rows]

    def settle(self, now_ns: int) -> None:
        """Bring the ledgers of all running requests up to `now_ns`, for a look at them between commits."""
        for resident in self._live.rows:
            self._live.settle(resident, now_ns)

    def check(self) -> None:
        """Raises AssertionError if requests, rows, blocks, steps and ledgers do not agree."""
        check_live(self._live)

    # inside

    def _set_paused(self, request_id: str, paused: bool, now_ns: int) -> None:
        live = self._live
        for request in live.requests.get(request_id, {}).values():
            resident = live.resident(request)
            if resident is None or resident.paused is paused:
                continue
            live.rows.set_paused(resident, paused)
            if resident.work_in_flight is None:
                live.set_state(resident, State.RESIDENT_UNSCHEDULED, now_ns)

    def _sort_again(self, now_ns: int) -> None:
        """The waiting only while somebody could enter: there may be thousands of them."""
        live = self._live
        running = [r.request for r in live.rows if not r.ended]
        self._order.look(running, now_ns)
        for request in (*running, *live.waiting.items) if live.rows.num_free else running:
            request.order_key = (*self._order.key(request, now_ns), request.order_key[-1])
        live.waiting.sort()
        live.rows.sort()
