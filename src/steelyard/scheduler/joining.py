"""The last part of a pass: who of the waiting gets a row, blocks and a first chunk, and why the others do not."""

from __future__ import annotations

from math import inf

from steelyard.core.request import Request
from steelyard.core.step import RowEnter
from steelyard.core.timed import State
from steelyard.scheduler.live import Live
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.planning import Draft, Planner
from steelyard.scheduler.protocols import Faults, Order
from steelyard.scheduler.reserve import Reserve
from steelyard.scheduler.rows import Resident
from steelyard.scheduler.waiting import DISPLACED

_SCARCE = 0.1
"""Below this share of clean blocks, cached ones are about to be evicted."""


class Joiner:
    """Admits in policy order: skips a private obstacle, stops at a shared one. Preempts what is paused, and what the
    order lets the head of the queue displace.

        queue   L1  L2  L3  s4  L5  s6        L1 at the head is long: s4 and s6 may pass it, with at most half of the
                |____________^       |        budget; while it lacks a row or blocks, `max_passes` of them and no more
    """

    def __init__(self, live: Live, planner: Planner, order: Order, options: SchedulerOptions, faults: Faults) -> None:
        self._live = live
        self._planner = planner
        self._order = order
        self._faults = faults
        self._reserve = Reserve(live, options.watermark)
        self._refused: tuple[Request | None, int] = (None, 0)
        self._blocked: tuple[Request | None, State] = (None, State.WAIT_SLOT)
        self._passes: tuple[Request | None, int] = (None, 0)
        self._max_passes = options.max_passes
        self._max_upcoming = options.max_upcoming
        self._whole_prompts = options.whole_prompts
        self._may_fork = options.kv_cache  # a step that computes from the first token writes every block

    def shortest_waiting(self, may_join: int) -> float:
        """The fewest tokens among the first that may join and the short that may pass them; infinity if none may."""
        count = min(may_join, self._live.rows.num_free, self._max_upcoming)
        upcoming = self._live.waiting.items[:count] + self._passing(may_join)[:1]
        return min((len(request.tokens) for request in upcoming), default=inf)

    def admit(self, draft: Draft, may_join: int) -> None:
        """Move requests from waiting to resident until something shared is in the way; label those that stay."""
        waiting, skipped = self._live.waiting, dict[Request, State]()
        shared: State | None = None
        self._reserve.observe()
        may_join -= self._admit_short(draft, may_join)
        at = 0
        while at < len(waiting.items):
            request = waiting.items[at]
            shared = self._shared_obstacle(draft, may_join, len(request.tokens))
            private = self._private_obstacle(request) if shared is None else None
            if shared is None and private is None:
                behind = waiting.items[at + 1 : at + 1 + self._max_upcoming]
                obstacle = self._enter(request, draft, min((len(r.tokens) for r in behind), default=inf))
                shared = State.WAIT_KV if obstacle is State.WAIT_KV else None
                private = obstacle if shared is None else None
            if private is not None:
                skipped[request] = private
                at += 1
                continue
            if shared is not None:
                if self._displace_paused(shared, draft):
                    at, skipped = 0, {}
                    continue
                break
            may_join -= 1
            if self._order.entered(request):
                self._sort(draft.now_ns)
                at, skipped = 0, {}
        head = waiting.items[at] if shared in (State.WAIT_SLOT, State.WAIT_KV) and not draft.pressure else None
        self._blocked = (head, shared or State.WAIT_SLOT)
        waiting.label(skipped, shared, draft.now_ns)
        self._keep_near()

    def _keep_near(self) -> None:
        """What those near the head have cached is evicted last, while blocks are short."""
        cache = self._live.cache
        if cache.enable_prefix_caching and any(clean < _SCARCE * total for total, clean, _ in cache.pools()):
            for request in reversed(self._live.waiting.items[: self._max_upcoming]):
                if not request.block_hashes:
                    cache.match(request)  # which makes them, where the server has not
                cache.keep(request.block_hashes)

    def make_way(self, now_ns: int) -> bool:
        """Preempt running requests that the order ranks below the head of the queue, if that lacked a row or blocks.

        False: there are some, and steps in flight must end first.
        """
        head, obstacle = self._blocked
        if head is None or not head.state.waiting:
            return True
        victims = self._victims(head, obstacle, now_ns)
        if victims and self._live.in_flight:
            return False
        for resident in victims:
            self._planner.preempter.displace(resident, now_ns)
        return True

    def _victims(self, head: Request, obstacle: State, now_ns: int) -> list[Resident]:
        """The fewest that free what `head` lacks, last in order first; none if all together would not."""
        rows, cache = self._live.rows, self._live.cache
        anchor = rows.anchor()
        below = [
            r for r in (*rows.decodes, *rows.prefills) if r is not anchor and self._order.may_displace(head, r.request)
        ]
        below.sort(key=lambda r: self._planner.preempter.key(r.request, now_ns), reverse=True)
        if obstacle is State.WAIT_SLOT:
            return below[:1]
        lacking = -(-len(head.tokens) // cache.block_size) + self._reserve.blocks() - cache.free_blocks()
        for count, resident in enumerate(below, 1):
            lacking -= resident.room // cache.block_size
            if lacking <= 0:
                return below[:count]
        return []

    def _passing(self, may_join: int) -> list[Request]:
        """Short prompts that may go before the long one at the head of the queue, which was not running before."""
        waiting = self._live.waiting
        if may_join <= 0 or not waiting.short or not self._live.rows.num_free:
            return []
        head = waiting.items[0]
        if waiting.is_short(head) or head.state in DISPLACED:
            return []
        if self._blocked[0] is head and self._passes[0] is head and self._passes[1] >= self._max_passes:
            return []
        near = waiting.short[: self._max_upcoming]
        return [r for r in near if self._order.may_pass(r, head) and self._private_obstacle(r) is None]

    def _admit_short(self, draft: Draft, may_join: int) -> int:
        """Admit short prompts before a long one, for at most half of the budget; returns how many."""
        if draft.pressure or self._planner.draining:
            return 0
        passing = self._passing(may_join)
        head = self._live.waiting.items[0]
        kept, count = draft.budget // 2, 0
        for request in passing:
            is_scarce = self._blocked[0] is head
            passes = self._passes[1] if self._passes[0] is head else 0
            if count == may_join or not self._live.rows.num_free or (is_scarce and passes >= self._max_passes):
                break
            if len(request.tokens) > kept:
                continue
            obstacle = self._enter(request, draft, inf)
            if obstacle is State.WAIT_KV:
                break
            if obstacle is None:
                kept -= len(request.tokens)
                count += 1
                self._passes = (head, passes + is_scarce)
                if self._order.entered(request):
                    self._sort(draft.now_ns)
        return count

    def _sort(self, now_ns: int) -> None:
        """The order has changed its mind about those that wait."""
        waiting = self._live.waiting
        for request in waiting.items:
            request.order_key = (*self._order.key(request, now_ns), request.order_key[-1])
        waiting.sort()

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
        self._planner.preempter.displace(rows.paused[-1], draft.now_ns)
        return True

    def _enter(self, request: Request, draft: Draft, shortest_behind: float) -> State | None:
        """Give `request` a row, blocks and a chunk; else why not, with nothing changed."""
        live, parent = self._live, request.fork_of
        swapped = bool(live.cache.swapped_tokens(request))
        spare = self._reserve.blocks()
        if self._refused == (request, live.cache.num_releases):
            return State.WAIT_KV  # nothing was freed since it did not fit: its prefix is not looked up again
        if not self._faults.before_allocate(request, len(request.tokens)):
            return State.WAIT_KV
        request.row = live.rows.next_free()
        fork_at = request.prompt_len - 1
        if parent is not None and fork_at and self._may_fork and live.cache.can_fork(parent, fork_at):
            num_new = self._fork(parent, request, spare, draft)
        else:
            hit, num_copied = self._come_by(request)
            if not swapped and self._is_coming(request, hit):
                request.row = -1
                return State.WAIT_POLICY
            num_new = self._take(
                request,
                hit,
                self._planner.share(len(request.tokens) - hit, draft.budget, shortest_behind),
                spare,
                draft,
            )
            live.counters.host_hits_tokens += num_copied if num_new else 0
        if not num_new:
            request.row = -1
            return State.WAIT_KV
        request.fork_of = None
        resident = live.enter(request, draft.now_ns, swapped)
        resident.room = live.cache.room(request)
        draft.enter.append(_row_enter(resident))
        self._planner.begin(resident, num_new, draft)
        return None

    def _come_by(self, request: Request) -> tuple[int, int]:
        """(positions whose KV need not be computed, of those the ones of a prefix that only the host has)."""
        cache = self._live.cache
        swapped = cache.swapped_tokens(request)
        here = swapped or cache.match(request)
        if swapped or not cache.host.num_slots:
            return here, 0
        more = cache.match(request, from_host=True) - here
        more = more if more and self._planner.preempter.copies_back(more) else 0
        return here + more, more

    def _is_coming(self, request: Request, hit_tokens: int) -> bool:
        """Whether a step that is planned or in flight fills the next block `request` could share: it waits for that."""
        cache = self._live.cache
        index, end = hit_tokens // cache.block_size, hit_tokens + cache.block_size
        if not cache.enable_prefix_caching or request.wants_every_position or end >= len(request.tokens):
            return False
        key = request.block_hashes[index]
        return any(
            r.request.num_computed < end <= r.next_start and r.request.block_hashes[index : index + 1] == [key]
            for r in (*self._live.rows.prefills, *(r for flight in self._live.in_flight for r in flight.filled))
        )

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

    def _take(self, request: Request, hit: int, num_new: int, spare: int, draft: Draft) -> int:
        """Take what is cached of the request, or kept of it on the host, and blocks for all that is known of it."""
        cache, known, swapped = self._live.cache, len(request.tokens), self._live.cache.swapped_tokens(request)
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
        elif not swapped:
            request.cached_tokens += max(0, hit - request.recompute_until)
        return num_new

    def _count_hit(self, request: Request, hit_tokens: int) -> None:
        """Of a first admission; later ones find again what was their own, and only what goes beyond it is a hit."""
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
