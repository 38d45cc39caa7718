"""The last part of a pass: who of the waiting gets a row, blocks and a first chunk, and why the others do not."""

from __future__ import annotations

from math import inf

from steelyard.core.request import Request
from steelyard.core.step import RowEnter, TableEdit
from steelyard.core.timed import State
from steelyard.scheduler.live import Live
from steelyard.scheduler.obstacles import (
    BATCH_CLOSED,
    GRAMMAR_COMPILES,
    NO_BLOCKS,
    NO_BUDGET,
    NO_ROW,
    NOT_YET,
    Lack,
    Obstacle,
    Passes,
    Refusal,
    Walk,
)
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.planning import PlanBuilder, Planner
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
        self._refused: Refusal | None = None
        self._lack: Lack | None = None
        self._passes: Passes | None = None
        self._max_passes = options.max_passes
        self._max_upcoming = options.max_upcoming
        self._whole_prompts = options.whole_prompts
        self._may_fork = options.kv_cache  # a step that computes from the first token writes every block

    def shortest_waiting(self, may_join: int) -> float:
        """The fewest tokens among the first that may join and the short that may pass them; infinity if none may."""
        count = min(may_join, self._live.rows.num_free, self._max_upcoming)
        upcoming = self._live.waiting.items[:count] + self._passing(may_join)[:1]
        return min((len(request.tokens) for request in upcoming), default=inf)

    def admit(self, plan: PlanBuilder, may_join: int) -> None:
        """Move requests from waiting to resident until something shared is in the way; label those that stay."""
        waiting = self._live.waiting
        self._reserve.observe()
        may_join -= self._admit_short(plan, may_join)
        walk = self._walk(plan, may_join)
        while walk.is_stale:
            may_join -= walk.num_joined
            walk = self._walk(plan, may_join)
        obstacle = walk.obstacle
        is_lacking = obstacle in (NO_ROW, NO_BLOCKS) and not plan.pressure
        self._lack = Lack(waiting.items[walk.at], obstacle) if obstacle is not None and is_lacking else None
        waiting.label(walk.skipped, None if obstacle is None else obstacle.state, plan.now_ns)
        self._keep_near()

    def _walk(self, plan: PlanBuilder, may_join: int) -> Walk:
        """From the head of the queue: requests join or are passed over, up to what is in the way of all."""
        items, walk = self._live.waiting.items, Walk(at=0, num_joined=0, skipped={})
        while walk.at < len(items):
            request = items[walk.at]
            obstacle = (
                self._shared_obstacle(plan, may_join - walk.num_joined, len(request.tokens))
                or self._private_obstacle(request)
                or self._enter(request, plan, self._shortest_behind(walk.at))
            )
            if obstacle is None:
                walk.num_joined += 1
                walk.is_stale = self._sort_if_changed(request, plan.now_ns)
            elif obstacle.is_shared:
                walk.obstacle, walk.is_stale = obstacle, self._displace_paused(obstacle, plan)
                return walk
            else:
                walk.skipped[request] = obstacle.state
                walk.at += 1
            if walk.is_stale:
                return walk
        return walk

    def _shortest_behind(self, at: int) -> float:
        """The fewest tokens among those next in the queue; infinity at its end."""
        behind = self._live.waiting.items[at + 1 : at + 1 + self._max_upcoming]
        return min((len(request.tokens) for request in behind), default=inf)

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
        lack = self._lack
        if lack is None or not lack.head.state.waiting:
            return True
        victims = self._victims(lack, now_ns)
        if victims and self._live.in_flight:
            return False
        for resident in victims:
            self._planner.preempter.displace(resident, now_ns)
        return True

    def _victims(self, lack: Lack, now_ns: int) -> list[Resident]:
        """The fewest that free what is lacking, last in order first; none if all together would not."""
        head, rows, cache = lack.head, self._live.rows, self._live.cache
        anchor = rows.anchor()
        below = [
            r for r in (*rows.decodes, *rows.prefills) if r is not anchor and self._order.may_displace(head, r.request)
        ]
        below.sort(key=lambda r: self._planner.preempter.key(r.request, now_ns), reverse=True)
        if lack.obstacle is NO_ROW:
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
        if self._lacks(head) and self._num_passes(head) >= self._max_passes:
            return []
        near = waiting.short[: self._max_upcoming]
        return [r for r in near if self._order.may_pass(r, head) and self._private_obstacle(r) is None]

    def _admit_short(self, plan: PlanBuilder, may_join: int) -> int:
        """Admit short prompts before a long one, for at most half of the budget; returns how many."""
        if plan.pressure or self._planner.draining:
            return 0
        passing = self._passing(may_join)
        head = self._live.waiting.items[0]
        kept, count = plan.budget // 2, 0
        for request in passing:
            is_scarce, passes = self._lacks(head), self._num_passes(head)
            if count == may_join or not self._live.rows.num_free or (is_scarce and passes >= self._max_passes):
                break
            if len(request.tokens) > kept:
                continue
            obstacle = self._enter(request, plan, inf)
            if obstacle is NO_BLOCKS:
                break
            if obstacle is None:
                kept -= len(request.tokens)
                count += 1
                self._passes = Passes(head, passes + is_scarce)
                self._sort_if_changed(request, plan.now_ns)
        return count

    def _lacks(self, head: Request) -> bool:
        return self._lack is not None and self._lack.head is head

    def _num_passes(self, head: Request) -> int:
        return self._passes.count if self._passes is not None and self._passes.head is head else 0

    def _sort_if_changed(self, joined: Request, now_ns: int) -> bool:
        """Whether the order, told of who joined, has changed its mind about those that wait: they are sorted again."""
        waiting = self._live.waiting
        if not self._order.entered(joined):
            return False
        for request in waiting.items:
            request.order_key = (*self._order.key(request, now_ns), request.order_key[-1])
        waiting.sort()
        return True

    def _shared_obstacle(self, plan: PlanBuilder, may_join: int, num_tokens: int) -> Obstacle | None:
        if plan.pressure:
            return NO_BLOCKS
        if may_join <= 0:
            return BATCH_CLOSED
        if not self._live.rows.num_free:
            return NO_ROW
        needed = num_tokens if self._whole_prompts else 1
        return NO_BUDGET if plan.budget < needed else None

    def _private_obstacle(self, request: Request) -> Obstacle | None:
        """Of a paused request, of a choice whose sibling still computes their prompt, of a grammar being compiled."""
        if request.has_grammar and not request.grammar_ready:
            return GRAMMAR_COMPILES
        if request.id in self._live.paused_ids:
            return NOT_YET
        parent = request.fork_of
        if parent is None or parent.state in (State.ENDED, State.OVERSHOOT):
            return None
        return NOT_YET if parent.num_computed < request.prompt_len - 1 else None

    def _displace_paused(self, obstacle: Obstacle, plan: PlanBuilder) -> bool:
        """Paused requests alone hold what the head of the queue lacks: one of them gives way."""
        rows = self._live.rows
        idle = not (rows.decodes or rows.prefills or self._live.in_flight or plan.work or plan.pressure)
        if not rows.paused or not idle or obstacle not in (NO_BLOCKS, NO_ROW):
            return False
        self._planner.preempter.displace(rows.paused[-1], plan.now_ns)
        return True

    def _enter(self, request: Request, plan: PlanBuilder, shortest_behind: float) -> Obstacle | None:
        """Give `request` blocks, then a row and a chunk; else why not, with nothing changed."""
        live, parent = self._live, request.fork_of
        swapped = bool(live.cache.swapped_tokens(request))
        spare = self._reserve.blocks()
        if self._refused == Refusal(request, live.cache.num_releases):
            return NO_BLOCKS  # nothing was freed since it did not fit: its prefix is not looked up again
        if not self._faults.before_allocate(request, len(request.tokens)):
            return NO_BLOCKS
        fork_at = request.prompt_len - 1
        if parent is not None and fork_at and self._may_fork and live.cache.can_fork(parent, fork_at):
            num_new = self._fork(parent, request, spare, plan)
        else:
            hit, num_copied = self._come_by(request)
            if not swapped and self._is_coming(request, hit):
                return NOT_YET
            wanted = self._planner.share(len(request.tokens) - hit, plan.budget, shortest_behind)
            num_new = self._take(request, hit, wanted, spare)
            live.counters.host_hits_tokens += num_copied if num_new else 0
        if not num_new:
            return NO_BLOCKS
        request.fork_of = None
        resident = live.enter(request, plan.now_ns, swapped)
        resident.room = live.cache.room(request)
        plan.enter.append(_row_enter(resident))
        tables = live.cache.tables(request)
        plan.edits += [TableEdit(group, resident.row, 0, tuple(table)) for group, table in enumerate(tables)]
        self._planner.begin(resident, num_new, plan)
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
            for r in (*self._live.rows.prefills, *(r for step in self._live.in_flight for r in step.filled))
        )

    def _fork(self, parent: Request, request: Request, spare: int, plan: PlanBuilder) -> int:
        """Share the sibling's prompt but for its last token, which the request computes itself. 0: no block is free."""
        cache, at = self._live.cache, request.prompt_len - 1
        if cache.free_blocks() < spare + 1:
            return 0
        copies = cache.fork(parent, request, at)
        grown = cache.grow(request, at + 1)
        assert copies is not None and grown is not None, "a fork takes one block of a group, which was free"
        plan.copies += copies
        request.num_computed = at
        request.prompt_logprobs = parent.prompt_logprobs[: request.prompt_len - 1]
        self._live.counters.forks += 1
        return 1

    def _take(self, request: Request, hit: int, num_new: int, spare: int) -> int:
        """Take what is cached of the request, or kept of it on the host, and blocks for all that is known of it.

        Returns how many tokens beyond the hit it has blocks for: `num_new`, less where windows are short of them, or 0.
        """
        cache, known, swapped = self._live.cache, len(request.tokens), self._live.cache.swapped_tokens(request)
        edits = cache.grow(request, hit + num_new, hit_tokens=hit, reserve_len=known, spare_blocks=spare)
        while edits is None and cache.has_windows and num_new > 1 and not self._whole_prompts:
            num_new //= 2
            edits = cache.grow(request, hit + num_new, hit_tokens=hit, reserve_len=known, spare_blocks=spare)
        if edits is None:
            rows = self._live.rows
            assert rows.num_free < len(rows.by_row), f"{request} does not fit, and nobody else has a block"
            self._refused = Refusal(request, cache.num_releases)
            return 0
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
