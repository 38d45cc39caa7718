"""One replica in steady state under continuous batching: what a load does to steps, queues and memory.

Everything follows from one unknown, u: requests that finish per step. Each request needs output - 1 decode steps and
its prompt computed once, so a mean step has

    rows decoding      B = u * (output - 1)
    prompt tokens      p = u * computed prompt
    and the rate is    u / T(u)

T is the mean step: a share of the steps carries a chunk of prompt, the others decode only. The fixed point of the
usual form, B = rate * (output - 1) * T(B), is then a search for the u whose rate is the one asked for; the rate grows
with u, and where even full steps do not reach it there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from steelyard.plan.calibration import Calibration
from steelyard.plan.costs import Chunk
from steelyard.plan.memory import KvPools
from steelyard.plan.queueing import Little, mean_wait, share_waiting_less, wait_quantile
from steelyard.plan.roofline import Roofline
from steelyard.plan.workload import Slo, Workload


@dataclass(frozen=True, slots=True)
class Limits:
    """What a replica may hold at once."""

    pools: KvPools
    num_blocks: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Service:
    """One replica: how long its steps take, and what it may hold. Of a calibration it takes what `steady` says."""

    roofline: Roofline
    calibration: Calibration
    limits: Limits
    _seen: dict[tuple[tuple[float, ...], ...], float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "calibration", self.calibration.steady)

    def step_s(self, rows: Sequence[tuple[int, int, float, int]]) -> float:
        """Seconds of a step with rows (num_new, context_len, count, num_sampled), counts fractional.

        Between whole counts the time is interpolated, one group after the other.
        """
        rows = tuple(r for r in rows if r[2] > 0.0)
        if rows not in self._seen:
            self._seen[rows] = self._interpolate(rows, ())
        return self._seen[rows]

    def _interpolate(self, rows: tuple[tuple[int, int, float, int], ...], done: tuple[Chunk, ...]) -> float:
        if not rows:
            return self.calibration.estimate(self.roofline, done).seconds if done else self.calibration.step_s
        (num_new, context, count, sampled), rest = rows[0], rows[1:]
        low, part = int(count), count - int(count)
        at_low = self._interpolate(rest, (*done, Chunk(num_new, context, low, sampled)) if low else done)
        if part == 0.0:
            return at_low
        at_high = self._interpolate(rest, (*done, Chunk(num_new, context, low + 1, sampled)))
        return at_low + part * (at_high - at_low)

    def at(self, load: Workload, requests_per_step: float) -> Point:
        """The steady state in which that many requests finish per step (at most `full`)."""
        budget = self.limits.max_num_batched_tokens
        decoding = requests_per_step * load.decode_steps
        prompt = requests_per_step * load.computed_len
        room = max(budget - decoding, 1.0)
        chunk = max(min(round(load.computed_len), int(room)), 1)
        held = max(round(load.input_len - (load.computed_len - chunk) / 2), chunk)  # an average chunk's context
        rows = ((1, round(load.mean_context), max(decoding, 1.0), 1),) if load.decode_steps else ()
        sampled = int(chunk >= load.computed_len)
        mixed_s = self.step_s((*rows, (chunk, held, max(prompt / chunk, 1.0), sampled)))
        full_s = self.step_s((*rows, (chunk, held, room / chunk, sampled)))
        alone_s = self.step_s(rows) if rows else mixed_s  # without decodes a step is a tick, idle or not
        share = min(prompt / chunk, 1.0)  # of steps that carry prompt
        step_s = share * mixed_s + (1.0 - share) * alone_s
        return Point(
            requests_per_step=requests_per_step,
            rate=requests_per_step / step_s,
            decoding=decoding,
            step_s=step_s,
            decode_step_s=alone_s,
            mixed_step_s=mixed_s,
            full_step_s=full_s,
            chunks_per_prompt=max(load.computed_len / chunk, 1.0),
            prompt_service_s=load.computed_len / room * full_s,
            token_share=(decoding + prompt) / budget,
            prefill_share=share * (mixed_s - (alone_s if rows else 0.0)) / step_s,
        )

    def full(self, load: Workload) -> float:
        """Requests per step at which every step is full: the device has no time left."""
        return self.limits.max_num_batched_tokens / (load.decode_steps + load.computed_len)

    def max_sequences(self, load: Workload) -> int:
        """Sequences of the mean held length that the KV pool has blocks for."""
        limits = self.limits
        return limits.pools.max_sequences(limits.num_blocks, max(math.ceil(load.mean_context), 1))


@dataclass(frozen=True, slots=True)
class Point:
    """A steady state of one replica. Times in seconds, rates per second.

    mixed_step_s      a step that carries prompt beside the decodes, on average
    full_step_s       one whose token budget prompts fill: the longest there is, and the longest gap between tokens
    prompt_service_s  device time per prompt when every step is filled up with prompts: the queue's service time
    token_share       of the token budget that a mean step uses
    prefill_share     of device time that prompts take, beyond what decoding alone would
    """

    requests_per_step: float
    rate: float
    decoding: float
    step_s: float
    decode_step_s: float
    mixed_step_s: float
    full_step_s: float
    chunks_per_prompt: float
    prompt_service_s: float
    token_share: float
    prefill_share: float

    @property
    def tpot_s(self) -> float:
        """Mean time between a request's tokens."""
        return self.step_s

    @property
    def prefill_s(self) -> float:
        """From admission to the first token: the step that runs already, if one does, and the prompt's own."""
        return min(self.decoding, 1.0) * self.step_s / 2 + self.chunks_per_prompt * self.mixed_step_s


@dataclass(frozen=True, slots=True)
class Latency:
    """What requests of a load see at a point; `attainment` is the share that meets every target."""

    wait_s: float
    ttft_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_s: float
    e2e_s: float
    attainment: float
    in_flight: float
    little: Little


def latency(load: Workload, point: Point, slo: Slo) -> Latency:
    """Latencies, attainment, and Little's law with in-flight requests counted by where they are.

    Prompts queue for one server, the step's budget that decodes leave.
    """
    busy = min(point.rate * point.prompt_service_s, 1.0)
    wait = mean_wait(point.rate, point.prompt_service_s, load.arrival_cv, load.service_cv)
    e2e = wait + point.prefill_s + load.decode_steps * point.step_s
    met = 1.0
    if slo.ttft_s is not None:
        met = share_waiting_less(slo.ttft_s - point.prefill_s, busy, wait)
    if slo.tpot_s is not None and load.decode_steps and point.tpot_s > slo.tpot_s * (1 + 1e-6):
        met = 0.0
    in_flight = point.rate * (wait + point.prefill_s) + point.decoding
    return Latency(
        wait_s=wait,
        ttft_s=wait + point.prefill_s,
        ttft_p90_s=point.prefill_s + wait_quantile(0.9, busy, wait),
        ttft_p99_s=point.prefill_s + wait_quantile(0.99, busy, wait),
        tpot_s=point.tpot_s,
        e2e_s=e2e,
        attainment=met,
        in_flight=in_flight,
        little=Little(in_flight, load.rate, e2e),
    )


def largest(holds: Callable[[float], bool], high: float) -> float:
    """The largest u in (0, high] for which a monotone condition holds, to 1 part in 10^6; 0 where it never does."""
    if holds(high):
        return high
    low = 0.0
    for _ in range(48):
        middle = (low + high) / 2 if low else high / 2
        if holds(middle):
            low = middle
        else:
            high = middle
        if low and high - low < 1e-6 * high:
            break
    return low
