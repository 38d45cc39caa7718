"""One rule a resource: the numbers it compares, how clearly they say so, and what speaks against it.

A rule's score is the least of its tests, each a ratio to its limit that is above 1 where the evidence is there. A test
whose number was not read is left out and named; a rule with none of its decisive numbers says nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steelyard.core.digits import in_digits
from steelyard.diagnose.knobs import advice
from steelyard.diagnose.observation import CAP_REACHED, Observation

DELAY_LIMIT_S = 0.010
RATE_LEAST = 0.98
KV_FULL = 0.95
KV_NOT_FULL = 0.90
ROW_SHARE = 0.5
NEAR_FLOOR = 1.5
MBU_HIGH = 0.6
UTIL_LOW = 0.4
STALL_RATIO = 3.0
DEVICE_BUSY = 0.9


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule says. `score` above 1: its evidence is there.

    knob  what to turn, in words, of what this server can turn; `flag` of it is one whose gain plan can tell, or empty
    """

    name: str
    score: float
    evidence: tuple[str, ...]
    knob: str
    flag: str = ""
    against: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.score >= 1.0 and not self.against


class _Tests:
    """Collects the tests of one rule on what was seen."""

    def __init__(self, seen: Observation) -> None:
        self._seen = seen
        self.ratios: list[float] = []
        self.evidence: list[str] = []
        self.against: list[str] = []

    def above(self, what: str, value: float | None, limit: float, unit: str = "") -> None:
        """Evidence if value >= limit."""
        if value is None:
            return
        self.ratios.append(min(value / limit, 100.0) if limit > 0 else 100.0 if value > 0 else 0.0)
        self.evidence.append(f"{what} {in_digits(value)}{unit} (evidence from {in_digits(limit)}{unit})")

    def below(self, what: str, value: float | None, limit: float, unit: str = "") -> None:
        """Evidence if value <= limit."""
        if value is None:
            return
        self.ratios.append(min(limit / value, 100.0) if value > 0 else 100.0)
        self.evidence.append(f"{what} {in_digits(value)}{unit} (evidence up to {in_digits(limit)}{unit})")

    def unless(self, condition: bool, why: str) -> None:
        if condition:
            self.against.append(why)

    def finding(self, name: str) -> Finding | None:
        if not self.ratios:
            return None
        knob, flag = advice(name, self._seen.settings)
        return Finding(name, min(self.ratios), tuple(self.evidence), knob, flag, tuple(self.against))


def client(o: Observation) -> Finding | None:
    """The client does not send what it was asked to. It binds only while the server has nothing waiting.

    Sends that come late are no verdict by themselves: one stall makes a late p99 in a run that lacks nothing. They
    count where requests were held back: fewer were sent than asked, or as many were in flight as the client lets.
    """
    t = _Tests(o)
    late = None if o.delay_s is None else o.delay_s / DELAY_LIMIT_S
    short = None
    if o.asked_rate and o.achieved_rate is not None:
        short = RATE_LEAST / max(o.achieved_rate / o.asked_rate, 1e-9)
        t.evidence.append(
            f"sent {in_digits(o.achieved_rate)}/s of {in_digits(o.asked_rate)}/s asked (limit {RATE_LEAST})"
        )
    if late is not None and o.delay_s is not None:
        t.evidence.append(f"sent late by {in_digits(o.delay_s * 1e3)} ms (limit {DELAY_LIMIT_S * 1e3:g} ms)")
    signs = [x for x in (late, short) if x is not None]
    if not signs:
        return None
    t.ratios.append(min(max(signs), 100.0))
    flight = o.little_in_flight
    held_back = short is not None and short >= 1.0
    if o.client_cap and flight is not None:
        t.evidence.append(f"{in_digits(flight)} in flight, the client's cap is {o.client_cap}")
        held_back = held_back or flight >= CAP_REACHED * o.client_cap
    t.unless(not held_back, "late sends alone: all that was asked was sent, and the client held nothing back")
    t.unless(
        (o.queued or 0.0) >= 1.0, f"the server has {in_digits(o.queued or 0.0)} waiting: it would not answer sooner"
    )
    return t.finding("client")


def sequence_cap(o: Observation) -> Finding | None:
    """Requests wait while as many run as may, and there is KV for more.

    The mean that runs is under the cap where sequences end together. The server's own reason for the waiting says it
    all the same, and so does the share of the readings at the cap.
    """
    if o.max_num_seqs is None or o.decoding is None:
        return None
    t = _Tests(o)
    mean_limit = CAP_REACHED * o.max_num_seqs
    if o.waited_for_row is not None:
        t.evidence.append(f"running {in_digits(o.decoding)} of {o.max_num_seqs}")
        t.above("share of the time waited that was for a row", o.waited_for_row, ROW_SHARE)
    elif o.at_cap is not None and o.decoding < mean_limit:
        t.evidence.append(f"running {in_digits(o.decoding)} of {o.max_num_seqs}")
        t.above("share of the readings at the cap while requests wait", o.at_cap, ROW_SHARE)
    else:
        t.above("running", o.decoding, mean_limit)
    t.above("waiting", o.queued, 1.0)
    if o.queue_s is not None and o.prefill_s is not None and o.queue_s > 0:
        t.above("time waiting over time in prefill", o.queue_s / max(o.prefill_s, 1e-9), 1.0)
    t.unless((o.kv_usage or 0.0) >= KV_FULL, f"KV is {o.kv_usage or 0.0:.0%} full: more sequences would not fit")
    return t.finding("sequence cap")


def kv_capacity(o: Observation) -> Finding | None:
    """The pool is full, and requests are preempted or wait although rows are free."""
    if o.kv_usage is None and not o.preemptions_per_s:
        return None
    t = _Tests(o)
    most = o.kv_usage_max if o.kv_usage_max is not None else o.kv_usage
    t.above("KV in use, at most", most, KV_FULL)
    under_cap = o.max_num_seqs is not None and o.decoding is not None and o.decoding < CAP_REACHED * o.max_num_seqs
    for_row = o.waited_for_row if o.waited_for_row is not None else o.at_cap
    if under_cap and (for_row or 0.0) < ROW_SHARE and not o.preemptions_per_s:
        t.above("waiting while rows are free", o.queued, 1.0)
    elif o.preemptions_per_s is not None:
        t.above("preemptions a second", o.preemptions_per_s, 1e-3)
    return t.finding("KV capacity")


def prefill_compute(o: Observation) -> Finding | None:
    """Prompts take the device: the time to a first token is computing, and gaps are long while prompts are computed."""
    t = _Tests(o)
    if o.mfu is not None:
        t.above("MFU", o.mfu, UTIL_LOW)
    if o.prefill_s is not None and o.decode_s is not None and o.queue_s is not None:
        whole = o.prefill_s + o.decode_s
        t.above("share of resident time in prefill", o.prefill_s / whole if whole else 0.0, 0.5)
    elif o.input_tokens_per_s is not None and o.output_tokens_per_s and o.ttft_s and o.e2e_s:
        t.above("share of a request's time before its first token", o.ttft_s / o.e2e_s, 0.5)
        t.above("prompt tokens per output token", o.input_tokens_per_s / o.output_tokens_per_s, 8.0)
        t.below("waiting", o.queued, 1.0)
    return t.finding("prefill compute")


def decode_bandwidth(o: Observation) -> Finding | None:
    """A decode step takes about what reading weights and KV takes."""
    step = o.step_s if o.step_s is not None else o.tpot_s
    if o.floor_step_s is None or step is None:
        return None
    t = _Tests(o)
    t.below("step over its floor", step / o.floor_step_s, NEAR_FLOOR)
    t.above("MBU", o.mbu, MBU_HIGH)
    return t.finding("decode bandwidth")


def host(o: Observation) -> Finding | None:
    """A step is long though neither arithmetic nor memory is busy: launches, Python, the loop.

    A device that computes all the time waits for no host, however far from its floor it is.
    """
    step = o.step_s if o.step_s is not None else o.tpot_s
    if o.floor_step_s is None or step is None:
        return None
    t = _Tests(o)
    t.above("step over its floor", step / o.floor_step_s, 2.5)
    t.below("MBU", o.mbu if o.mbu is not None else o.floor_step_s / step, UTIL_LOW)
    t.below("MFU", o.mfu, UTIL_LOW)
    t.unless(
        (o.busy or 0.0) >= DEVICE_BUSY, f"the device computes {o.busy or 0.0:.0%} of the time: it waits for no host"
    )
    return t.finding("host")


def interference(o: Observation) -> Finding | None:
    """Decodes stall while another's prompt is computed in the same step."""
    if o.icl_p50_s is None or o.icl_p99_s is None or o.icl_p50_s <= 0:
        return None
    t = _Tests(o)
    t.above("gap at p99 over p50", o.icl_p99_s / o.icl_p50_s, STALL_RATIO)
    t.above("long gaps with prompt tokens in the step", o.stalls_with_prefill, 0.5)
    if o.stalls_with_prefill is None:
        t.above("prompt tokens a second", o.input_tokens_per_s, 1.0)
    return t.finding("interference")


def device(o: Observation) -> Finding | None:
    """The device computes all the time: what it computes may be any of the others, but more requests only wait."""
    if o.busy is None:
        return None
    t = _Tests(o)
    t.above("share of the time in which the device computes", o.busy, DEVICE_BUSY)
    return t.finding("device")


def fragmentation(o: Observation) -> Finding | None:
    """Allocations fail although blocks or bytes are free."""
    if o.free_but_failed is None:
        return None
    t = _Tests(o)
    t.above("allocations that failed with blocks free", o.free_but_failed, 1.0)
    return t.finding("fragmentation")


RULES: tuple[Callable[[Observation], Finding | None], ...] = (
    client,
    sequence_cap,
    kv_capacity,
    prefill_compute,
    decode_bandwidth,
    host,
    interference,
    fragmentation,
    device,
)
