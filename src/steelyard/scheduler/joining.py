"""The last part of a pass: who of the waiting gets a row, blocks and a first chunk, and why the others do not."""

from __future__ import annotations

from math import ceil, inf

from steelyard.core.request import Request
from steelyard.core.step import RowEnter
from steelyard.core.timed import State
from steelyard.scheduler.live import Live
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.planning import Draft, Planner
from steelyard.scheduler.protocols import Faults
from steelyard.scheduler.rows import Resident


class Joiner:
    """Admits in policy order: skips a private obstacle, stops at a shared one. Preempts only what is paused."""

    def __init__(self, live: Live, planner: Planner, options: SchedulerOptions, faults: Faults) -> None:
        self._live = live
        self._planner = planner
        self._faults = faults
        self._refused: tuple[Request | None, int] = (None, 0)
        self._max_upcoming = options.max_upcoming
        self._whole_prompts = options.whole_prompts
        self._may_fork = options.kv_cache  # a step that computes from the first token writes every block
        self._watermark_blocks = ceil(options.watermark * live.cache.smallest_pool())

    def shortest_waiting(self, may_join: int) -> float:
        """The fewest tokens among the first that may join; infinity if none may."""
        count = min(may_join, self._live.rows.num_free, self._max_upcoming)
        return min((len(request.tokens) for request in self._live.waiting.items[:count]), default=inf)

    def admit(self, draft: Draft, may_join: int) -> None:
        """Move requests from waiting to resident until something shared is in the way; label those that stay."""
        waiting, skipped = self._live.waiting, dict[Request, State]()
        shared: State | None = None
        at = 0
        while at < len(waiting.items):
            request = waiting.items[at]
            shared = self._shared_obstacle(draft, may_join, len(request.tokens))
            if shared is None and (private := self._private_obstacle(request)) is not None:
                skipped[request] = private
                at += 1
                continue
            if shared is None and not self._enter(request, draft, at):
                shared = State.WAIT_KV
            if shared is not None:
                if self._displace_paused(shared, draft):
                    at, skipped = 0, {}
                    continue
                break
            may_join -= 1
        waiting.label(skipped, shared, draft.now_ns)

    def _shared_obstacle(self, draft: Draft, may_join: int, num_tokens: int) -> State | None:
        if draft.pressure:
            return State.WAIT_KV
        if may_join <= 0:
            return State.WAIT_POLICY
        if not self._live.rows.num_free:
            return State.WAIT_SLOT
        needed = num_tokens if self._whole_prompts else 1
        return State.WAIT_BUDGET if draft.budget < needed else None

    def _private_obstacle(self, request: Request) -> State | None:
        """Of a paused request, of a choice whose sibling still computes their prompt, of a grammar being compiled."""
        if request.has_grammar and not request.grammar_ready:
            return State.WAIT_GRAMMAR
        if request.id in self._live.paused_ids:
            return State.WAIT_POLICY
        parent = request.fork_of
        if parent is None or parent.state in (State.ENDED, State.OVERSHOOT):
            return None
        return State.WAIT_POLICY if parent.num_computed < request.prompt_len - 1 else None

    def _displace_paused(self, obstacle: State, draft: Draft) -> bool:
        """Paused requests alone hold what the head of the queue lacks: one of them gives way."""
        rows = self._live.rows
        idle = not (rows.decodes or rows.prefills or self._live.in_flight or draft.work or draft.pressure)
        if not rows.paused or not idle or obstacle not in (State.WAIT_KV, State.WAIT_SLOT):
            return False
        self._live.preempt(rows.paused[-1], draft.now_ns)
        return True

    def _enter(self, request: Request, draft: Draft, at: int) -> bool:
        """Give `request` a row, blocks and a chunk; False with nothing changed if there are no blocks."""
        live, parent = self._live, request.fork_of
        spare = self._watermark_blocks if live.rows.num_running else 0
        if not self._faults.before_allocate(request, len(request.tokens)):
            return False
        request.row = live.rows.next_free()
        fork_at = request.prompt_len - 1
        if parent is not None and fork_at and self._may_fork and live.cache.can_fork(parent, fork_at):
            num_new = self._fork(parent, request, spare, draft)
        else:
            num_new = self._match(request, spare, draft, at)
        if not num_new:
            request.row = -1
            return False
        request.fork_of = None
        resident = live.enter(request, draft.now_ns)
        resident.room = live.cache.room(request)
        draft.enter.append(_row_enter(resident))
        self._planner.chunk(resident, request.num_computed, num_new, draft)
        return True

    def _fork(self, parent: Request, request: Request, spare: int, draft: Draft) -> int:
        """Share the sibling's prompt but for its last token, which the request computes itself."""
        cache, at = self._live.cache, request.prompt_len - 1
        if cache.free_blocks() < spare + 1:
            return 0
        forked = cache.fork(parent, request, at)
        more = cache.grow(request, at + 1) if forked is not None else None
        if forked is None or more is None:
            cache.release(request)
            return 0
        draft.edits += [*forked[0], *more]
        draft.copies += forked[1]
        request.num_computed = at
        request.prompt_logprobs = parent.prompt_logprobs[: request.prompt_len - 1]
        self._live.counters.forks += 1
        return 1

    def _match(self, request: Request, spare: int, draft: Draft, at: int) -> int:
        """Take what is cached of the request, and blocks for all that is known of it."""
        cache, known = self._live.cache, len(request.tokens)
        if self._refused == (request, cache.num_releases):
            return 0  # nothing was freed since it did not fit: its prefix is not looked up again
        hit = cache.match(request)
        behind = self._live.waiting.items[at + 1 : at + 1 + self._max_upcoming]
        num_new = self._planner.share(known - hit, draft.budget, min((len(r.tokens) for r in behind), default=inf))
        edits = cache.grow(request, hit + num_new, hit_tokens=hit, reserve_len=known, spare_blocks=spare)
        while edits is None and cache.has_windows and num_new > 1 and not self._whole_prompts:
            num_new //= 2
            edits = cache.grow(request, hit + num_new, hit_tokens=hit, reserve_len=known, spare_blocks=spare)
        if edits is None:
            self._refused = (request, cache.num_releases)
            return 0
        draft.edits += edits
        request.num_computed = hit
        if not request.num_preemptions:
            self._count_hit(request, hit)
        return num_new

    def _count_hit(self, request: Request, hit_tokens: int) -> None:
        """Only a first admission looks for a prefix; what a preempted request finds again is its own."""
        counters = self._live.counters
        request.cached_tokens = hit_tokens
        counters.prompt_tokens += request.prompt_len
        if self._live.cache.enable_prefix_caching:
            counters.prefix_queries_tokens += request.prompt_len
            counters.prefix_hits_tokens += hit_tokens


def _row_enter(resident: Resident) -> RowEnter:
    request = resident.request
    return RowEnter(
        row=resident.row,
        epoch=resident.epoch,
        tokens=tuple(request.tokens),
        prompt_len=request.prompt_len,
        start=request.num_computed,
        sampling=request.sampling,
    )
