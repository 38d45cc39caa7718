"""Reserving KV memory against paging it: the waste of each, computed by replaying live allocators. Slots, not bytes.

    reserve   |AAAAAAaaaaaaaaaa........|BBBBb|....|CCCCCCCccccc....|..|      contiguous, at admission, first fit
    page      |AAAA|BBBB|AA..|CCCC|B...|CCC.|....|....|                      a block when it is needed

A slot is at any instant exactly one of: filled (holds a token's KV), reserved (will be filled later by its owner),
internal (allocated, never filled), external (free, enough in sum for the next request, in no hole large enough), or
idle (free, too few for the next request, or nobody waits).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from steelyard.errors import StartError

Policy = Literal["max", "pow2", "oracle", "paged"]
POLICIES: tuple[Policy, ...] = ("max", "pow2", "oracle", "paged")


class FirstFit:
    """A contiguous allocator over `capacity` slots: each request gets the lowest hole that is large enough."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._starts: list[int] = []
        self._taken: list[tuple[int, int]] = []  # (start, size), by start
        self._where: dict[str, int] = {}

    def allocate(self, owner: str, size: int) -> int | None:
        """The start of `size` slots for `owner`, or None where no hole is large enough (nothing changes)."""
        assert owner not in self._where and size >= 1
        for start, length in self.holes():
            if length >= size:
                at = bisect_left(self._starts, start)
                self._starts.insert(at, start)
                self._taken.insert(at, (start, size))
                self._where[owner] = start
                return start
        return None

    def free(self, owner: str) -> None:
        """Give back all slots of `owner`."""
        at = bisect_left(self._starts, self._where.pop(owner))
        del self._starts[at], self._taken[at]

    def holes(self) -> list[tuple[int, int]]:
        """Free (start, size) in order of address."""
        found, end = [], 0
        for start, size in self._taken:
            if start > end:
                found.append((end, start - end))
            end = start + size
        if end < self.capacity:
            found.append((end, self.capacity - end))
        return found

    @property
    def num_free(self) -> int:
        return self.capacity - sum(size for _, size in self._taken)

    @property
    def largest_hole(self) -> int:
        return max((size for _, size in self.holes()), default=0)


@dataclass(frozen=True, slots=True)
class Event:
    """What a replayed event led to. `start` None: an allocation failed, or it was a release."""

    text: str
    start: int | None
    failed: bool
    num_free: int
    largest_hole: int
    holes: tuple[tuple[int, int], ...]


def replay(capacity: int, events: Sequence[tuple[str, int]]) -> list[Event]:
    """Run (owner, size) events through a first-fit allocator; size 0 releases the owner."""
    allocator = FirstFit(capacity)
    told = []
    for owner, size in events:
        start = None
        if size:
            start = allocator.allocate(owner, size)
            text = f"{owner} asks for {size}"
        else:
            allocator.free(owner)
            text = f"{owner} leaves"
        holes = tuple(allocator.holes())
        told.append(Event(text, start, bool(size) and start is None, allocator.num_free, allocator.largest_hole, holes))
    return told


STORY_CAPACITY = 500
STORY = (("A", 200), ("B", 150), ("A", 0), ("C", 180), ("D", 165))
"""A 200 and B 150 come, A leaves, C 180 takes A's place and leaves a sliver of 20 nobody fits: D 165 finds 170 free
slots in two holes of 20 and 150, and must wait. Paged, D fits."""


@dataclass(frozen=True, slots=True)
class Use:
    """Slot-steps of a run by kind, integers that sum to capacity * num_steps; and how well the run went.

    Counted are the `num_steps` steps in which requests waited (all steps, where none ever did): an emptying server
    is not what memory is wasted on.
    """

    policy: Policy
    capacity: int
    total_steps: int
    num_steps: int
    filled: int
    reserved: int
    internal: int
    external: int
    idle: int
    num_finished: int
    num_preempted: int
    running_sum: int

    def share(self, kind: str) -> float:
        """Share of all slot-steps that were "filled", "reserved", "internal", "external" or "idle"."""
        return float(getattr(self, kind)) / (self.capacity * self.num_steps)

    @property
    def mean_running(self) -> float:
        return self.running_sum / self.num_steps


@dataclass(slots=True)
class _Running:
    name: str
    prompt_len: int
    final_len: int
    size: int
    filled: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests (prompt, output) that all wait at the start, served in order; each running one gains a token a step.

    max_len     longest sequence the server accepts: what "max" reserves
    block_size  of "paged"
    """

    lengths: tuple[tuple[int, int], ...]
    capacity: int
    max_len: int
    block_size: int = 16

    def run(self, policy: Policy) -> Use:
        """Replay under a policy until every request has finished.

        max: reserve max_len; pow2: prompt and the output rounded up to a power of two; oracle: exactly what will be
        used; paged: blocks as they are needed, and the latest to come starts over when none is left.
        Raises StartError where a request can never fit.
        """
        most = max(self.size_of(policy, p, o) for p, o in self.lengths)
        if most > self.capacity:
            raise StartError(f"a request reserves {most} slots of {self.capacity}", param="capacity")
        return _Run(self, policy).finish()

    def size_of(self, policy: Policy, prompt_len: int, output_len: int) -> int:
        """Slots a request holds at its end."""
        whole = prompt_len + output_len
        if policy == "max":
            return max(self.max_len, whole)
        if policy == "pow2":
            return prompt_len + (1 << (output_len - 1).bit_length())
        if policy == "oracle":
            return whole
        return -(-whole // self.block_size) * self.block_size


_SUMS = ("filled", "reserved", "internal", "external", "idle", "running", "steps")
_WATERMARK = 0.01
"""Share of the blocks that admission leaves free for those that run already to grow into."""


class _Run:
    """The state of one replay."""

    def __init__(self, replay: Replay, policy: Policy) -> None:
        self.replay, self.policy = replay, policy
        self.allocator = FirstFit(replay.capacity)
        self.capacity = replay.capacity
        if policy == "paged":
            self.capacity = replay.capacity // replay.block_size * replay.block_size
        self.free_slots = self.capacity
        self.waiting = [(str(i), p, p + o) for i, (p, o) in enumerate(replay.lengths)][::-1]
        self.running: list[_Running] = []
        self.crowded = dict.fromkeys(_SUMS, 0)
        self.alone = dict.fromkeys(_SUMS, 0)
        self.finished = self.preempted = 0

    def finish(self) -> Use:
        while self.waiting or self.running:
            self._admit()
            self._grow()
            self._account()
            self._retire()
        s = self.crowded if self.crowded["steps"] else self.alone
        total = self.crowded["steps"] + self.alone["steps"]
        kinds = (s["filled"], s["reserved"], s["internal"], s["external"], s["idle"])
        ends = (self.finished, self.preempted, s["running"])
        return Use(self.policy, self.replay.capacity, total, s["steps"], *kinds, *ends)

    def _admit(self) -> None:
        while self.waiting:
            name, prompt, final = self.waiting[-1]
            size = self._first_size(prompt, final)
            if self.policy == "paged":
                if size + self._room_to_grow() > self.free_slots:
                    return
            elif self.allocator.allocate(name, size) is None:
                return
            self.free_slots -= size
            self.waiting.pop()
            self.running.append(_Running(name, prompt, final, size, prompt))

    def _room_to_grow(self) -> int:
        """Slots kept free at admission; none where nothing runs, so that a request alone always enters."""
        return int(self.capacity * _WATERMARK) if self.running else 0

    def _first_size(self, prompt: int, final: int) -> int:
        """Slots taken at admission: the prompt and a first token's block if paged, else everything."""
        if self.policy == "paged":
            return self.replay.size_of("paged", prompt, 1)
        return self.replay.size_of(self.policy, prompt, final - prompt)

    def _grow(self) -> None:
        """A token for each running request, oldest first; where no block is left the latest starts over."""
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if self.policy == "paged" and request.filled == request.size:
                block = self.replay.block_size
                while self.free_slots < block and len(self.running) > index + 1:
                    self._preempt()
                if self.free_slots < block:
                    self._preempt()
                    return
                request.size += block
                self.free_slots -= block
            request.filled += 1
            index += 1

    def _preempt(self) -> None:
        latest = self.running.pop()
        self.free_slots += latest.size
        self.waiting.append((latest.name, latest.prompt_len, latest.final_len))
        self.preempted += 1

    def _account(self) -> None:
        filled = sum(r.filled for r in self.running)
        if self.policy == "paged":
            future = sum(min(r.size, r.final_len) for r in self.running)
        else:
            future = sum(r.final_len for r in self.running)
        taken = sum(r.size for r in self.running)
        s = self.crowded if self.waiting else self.alone
        s["filled"] += filled
        s["reserved"] += future - filled
        s["internal"] += taken - future
        s["external" if self._is_external() else "idle"] += self.replay.capacity - taken
        s["running"] += len(self.running)
        s["steps"] += 1

    def _is_external(self) -> bool:
        """True where the next request would fit the free slots in sum, and no hole."""
        if self.policy == "paged" or not self.waiting:
            return False
        _, prompt, final = self.waiting[-1]
        return self._first_size(prompt, final) <= self.free_slots

    def _retire(self) -> None:
        done = [r for r in self.running if r.filled >= r.final_len]
        for request in done:
            self.free_slots += request.size
            if self.policy != "paged":
                self.allocator.free(request.name)
        self.running = [r for r in self.running if r.filled < r.final_len]
        self.finished += len(done)


def sample_lengths(
    count: int, mean_prompt: float, mean_output: float, *, max_len: int, seed: int = 0, spread: float = 1.0
) -> tuple[tuple[int, int], ...]:
    """(prompt, output) pairs from log-normal distributions with the given means, cut to `max_len` in sum.

    `spread` is the standard deviation of the logarithm: 0 makes all alike, 1 is near chat traces.
    """
    rng = random.Random(seed)

    def draw(mean: float) -> int:
        return max(1, round(mean * rng.lognormvariate(-spread * spread / 2, spread)))

    pairs = []
    for _ in range(count):
        prompt = min(draw(mean_prompt), max_len - 1)
        pairs.append((prompt, min(draw(mean_output), max_len - prompt)))
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """What a block size costs and gives.

    waste_tokens   unfilled slots of a sequence's last block, on average over the lengths
    waste_share    those over all slots allocated
    table_entries  block numbers of a sequence of mean length
    hit_loss       tokens of a shared prefix that are not reused because they fill no whole block, on average
    run_bytes      contiguous bytes of one layer's keys in a block: what one read can fetch
    """

    block_size: int
    waste_tokens: float
    waste_share: float
    table_entries: int
    hit_loss: float
    run_bytes: int


def block_choices(
    final_lens: Sequence[int], key_bytes_per_slot: int, sizes: Sequence[int] = (1, 8, 16, 32, 64, 128, 256)
) -> list[BlockChoice]:
    """The trade-off over block sizes, for sequences that end at `final_lens` tokens."""
    mean = sum(final_lens) / len(final_lens)
    found = []
    for size in sizes:
        allocated = [-(-n // size) * size for n in final_lens]
        waste = (sum(allocated) - sum(final_lens)) / len(final_lens)
        share = waste * len(final_lens) / sum(allocated)
        entries = -(-round(mean) // size)
        found.append(BlockChoice(size, waste, share, entries, (size - 1) / 2, size * key_bytes_per_slot))
    return found
