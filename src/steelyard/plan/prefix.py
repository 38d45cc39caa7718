"""What cached KV is worth: reusing it, bringing it back, and deleting history. Times are estimates, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from steelyard.errors import StartError
from steelyard.plan.calibration import Calibration
from steelyard.plan.capacity import constraints
from steelyard.plan.costs import Chunk, decode
from steelyard.plan.roofline import Roofline
from steelyard.plan.service import Service
from steelyard.plan.workload import Slo, Workload


@dataclass(frozen=True, slots=True)
class Economics:
    """The arithmetic of cached tokens for one setup."""

    roofline: Roofline
    calibration: Calibration

    def restore(self, num_tokens: int, network_bandwidth: float | None = None) -> Restore:
        """Ways to have the KV of `num_tokens` back on the device."""
        size = self.roofline.costs.kv_bytes(num_tokens)
        device = self.roofline.setup.device
        return Restore(
            num_tokens=num_tokens,
            bytes=size,
            recompute_s=self._step_s(Chunk(num_tokens, num_tokens)),
            swap_s=size / device.host_bandwidth,
            transfer_s=size / network_bandwidth if network_bandwidth else math.inf,
        )

    def compaction(self, case: History) -> Compaction:
        """What deleting history costs once and saves each turn.

        Everything behind the deletion has new positions and a new prefix, so its cached KV is lost: the summary and
        the tail are computed again. From then on each turn reads, and attends to, less.
        """
        case.check()
        before = case.context_len
        after = before - case.removed_len + case.summary_len
        redo = case.summary_len + case.tail_len
        once = self._step_s(Chunk(redo, after)) if redo else 0.0
        once += case.summary_len * self._row_s(case.batch, before)  # the model writes the summary itself
        saved = self._turn_s(case, before) - self._turn_s(case, after)
        turns = once / saved if saved > 0.0 else math.inf
        freed = self.roofline.costs.kv_bytes(before) - self.roofline.costs.kv_bytes(after)
        return Compaction(once, saved, turns, saved * case.turns - once, freed)

    def _turn_s(self, case: History, context_len: int) -> float:
        """Device time of one turn at a context: its prompt (all of it where the cache missed) and its output."""
        whole = context_len + case.new_len
        hit = self._step_s(Chunk(case.new_len, whole))
        miss = self._step_s(Chunk(whole, whole))
        rows = case.output_len * self._row_s(case.batch, whole + case.output_len // 2)
        return case.hit_rate * hit + (1.0 - case.hit_rate) * miss + rows

    def _row_s(self, batch: int, context_len: int) -> float:
        """A row's share of a decode step with `batch` rows like it."""
        return self.calibration.estimate(self.roofline, decode(batch, context_len)).seconds / batch

    def _step_s(self, chunk: Chunk) -> float:
        return self.calibration.estimate(self.roofline, (chunk,)).seconds


@dataclass(frozen=True, slots=True)
class Restore:
    """Bringing KV back: computing it again, from host memory, or over a network (infinite where there is none)."""

    num_tokens: int
    bytes: int
    recompute_s: float
    swap_s: float
    transfer_s: float

    @property
    def best(self) -> str:
        """The quickest: "recompute", "swap" or "transfer"."""
        ways = {"recompute": self.recompute_s, "swap": self.swap_s, "transfer": self.transfer_s}
        return min(ways, key=lambda name: ways[name])

    @property
    def break_even_bandwidth(self) -> float:
        """Bytes/s from which loading beats computing again."""
        return self.bytes / self.recompute_s


@dataclass(frozen=True, slots=True)
class History:
    """A conversation and a deletion from its middle.

        [ kept prefix | removed ... | tail ]   ->   [ kept prefix | summary | tail ]

    turns      still to come; each brings `new_len` tokens and answers with `output_len`
    batch      rows decoding together, which share the reading of weights
    hit_rate   probability that a turn finds its prefix cached
    """

    context_len: int
    removed_len: int
    tail_len: int
    summary_len: int
    turns: int
    new_len: int = 200
    output_len: int = 300
    batch: int = 32
    hit_rate: float = 1.0

    def check(self) -> None:
        """Raises StartError where lengths do not fit together, naming the field."""
        if self.turns < 1:
            raise StartError(f"--turns must be at least 1, got {self.turns}", param="turns")
        if not 0 < self.removed_len <= self.context_len - self.tail_len or self.tail_len < 0:
            raise StartError(
                f"--remove {self.removed_len} and --tail {self.tail_len} must fit the context of {self.context_len}",
                param="remove",
            )
        if not 0 <= self.summary_len < self.removed_len:
            raise StartError(
                f"--summary {self.summary_len} must be shorter than what it replaces, {self.removed_len} tokens",
                param="summary",
            )
        if not 0.0 <= self.hit_rate <= 1.0:
            raise StartError(f"--hit-rate must be between 0 and 1, got {self.hit_rate:g}", param="hit_rate")


@dataclass(frozen=True, slots=True)
class Compaction:
    """A deletion's balance in device seconds; `break_even_turns` infinite where it never pays."""

    once_s: float
    saved_per_turn_s: float
    break_even_turns: float
    net_s: float
    freed_bytes: int

    @property
    def worth_it(self) -> bool:
        return self.net_s > 0.0


def break_even_hit_share(service: Service, load: Workload, slo: Slo, pool_share: float) -> float | None:
    """The share of prompt tokens that must hit for a prefix cache to pay for the part of the pool it holds.

    A cache that keeps `pool_share` of the blocks leaves fewer for running requests. Found by bisection on the
    capacity with hits and the smaller pool, against the whole pool without; None where even 99 % does not pay.
    """
    base = constraints(service, load, slo)[0].rate
    kept = tuple(int(n * (1.0 - pool_share)) for n in service.limits.num_blocks)
    smaller = replace(service, limits=replace(service.limits, num_blocks=kept), _seen={})

    def pays(share: float) -> bool:
        return constraints(smaller, replace(load, cached_tokens=share * load.input_len), slo)[0].rate >= base

    if not pays(0.99):
        return None
    if pays(0.0):
        return 0.0
    low, high = 0.0, 0.99
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
