"""What was seen of a server over some time, in one shape whatever its source. None: not read. Judges nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CAP_REACHED = 0.95
"""Of a cap: from here on it is what holds requests back."""
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Observation:
    """Rates a second, times in seconds, shares from 0 to 1.

    asked_rate, achieved_rate   requests a second the client meant to send, and sent
    delay_s                     schedule delay, mean or p99, whichever the source has
    client_cap                  requests the client lets be in flight
    in_flight                   mean number in flight; Little's law gives it where it is not read
    running, waiting            the server's own means
    max_num_seqs                its cap on running sequences
    at_cap                      share of the readings with somebody waiting in which as many ran as may
    waited_for_row              share of all time waited, by the server's accounts, that was for a row to run in
    kv_usage                    share of KV blocks in use, the mean (kv_usage_max: the most)
    input_tokens_per_s          prompt tokens computed
    ttft_s, tpot_s, icl_p50_s, icl_p99_s, e2e_s
    step_s, step_tokens         a mean step, where the engine exports it
    floor_step_s                plan's floor of a decode step of this batch and context
    busy                        share of the time in which the device computed a step
    mbu, mfu                    of a mean step, by plan
    stalls_with_prefill         share of the long gaps in which the step had prompt tokens
    free_but_failed             allocations refused although blocks were free
    attainment                  share that met its targets
    invalid                     of a run that failed its gates: which, and why; not to be believed
    settings                    what the server says it runs with, as words; empty: it does not say
    source                      where the numbers come from; unread: what could not be read, and why
    """

    source: str
    asked_rate: float | None = None
    achieved_rate: float | None = None
    delay_s: float | None = None
    client_cap: int | None = None
    in_flight: float | None = None
    running: float | None = None
    waiting: float | None = None
    max_num_seqs: int | None = None
    at_cap: float | None = None
    waited_for_row: float | None = None
    kv_usage: float | None = None
    kv_usage_max: float | None = None
    preemptions_per_s: float | None = None
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    input_len: float | None = None
    output_len: float | None = None
    prefix_hit_rate: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    icl_p50_s: float | None = None
    icl_p99_s: float | None = None
    e2e_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    step_s: float | None = None
    floor_step_s: float | None = None
    busy: float | None = None
    mbu: float | None = None
    mfu: float | None = None
    stalls_with_prefill: float | None = None
    free_but_failed: float | None = None
    attainment: float | None = None
    invalid: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = field(default_factory=tuple)

    @property
    def little_in_flight(self) -> float | None:
        """Requests in flight: read, or rate times time in the server."""
        if self.in_flight is not None:
            return self.in_flight
        if self.achieved_rate is None or self.e2e_s is None:
            return None
        return self.achieved_rate * self.e2e_s

    @property
    def decoding(self) -> float | None:
        """Sequences running: read, or output tokens a second times the time of one token."""
        if self.running is not None:
            return self.running
        if self.output_tokens_per_s is None or self.tpot_s is None:
            return None
        return self.output_tokens_per_s * self.tpot_s

    @property
    def queued(self) -> float | None:
        """Requests waiting in the server: read, or those in flight that do not run."""
        if self.waiting is not None:
            return self.waiting
        flight, running = self.little_in_flight, self.decoding
        if flight is None or running is None or self.max_num_seqs is None:
            return None
        return max(flight - max(running, 0.0), 0.0)


def share_at_cap(running: Points, waiting: Points, cap: int | None) -> float | None:
    """Of the readings (time, number) in which a request waited; None where none did, or without a cap.

    A mean hides it: sequences that end together leave rows free for a moment, and the next ones fill them.
    """
    runs = dict(running)
    held = [runs[t] >= CAP_REACHED * cap for t, number in waiting if number >= 1.0 and t in runs] if cap else []
    return sum(held) / len(held) if held else None


def share_for_row(seconds_by_state: Mapping[str, float], waiting: float | None, seconds: float) -> float | None:
    """Of the time waited, by a server's accounts; None where nobody waited.

    None too where they hold less than half of what `waiting`, the mean number over `seconds`, makes: an account closes
    with its request, and those that wait still may wait for something else.
    """
    waited = sum(spent for state, spent in seconds_by_state.items() if state.startswith("wait_"))
    if waited <= 0.0 or waited < (waiting or 0.0) * seconds / 2:
        return None
    return seconds_by_state.get("wait_slot", 0.0) / waited


def derived_tpot_s(e2e_s: float, ttft_s: float, output_len: float) -> float | None:
    """(E2E - TTFT) / (n - 1), from means; None for one token."""
    return (e2e_s - ttft_s) / (output_len - 1.0) if output_len > 1.0 else None
