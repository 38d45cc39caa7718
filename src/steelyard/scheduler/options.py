"""What an operator may set on the scheduler, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from steelyard.scheduler.speculation import OFF, Speculation


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits; None takes the runner's.

    overlap              step N + 1 may be scheduled while step N is in flight
    watermark            share of the pool that stays free when a request is admitted beside others
    max_upcoming         how many waiting requests a pass looks at to share the budget
    short_share          a prompt of at most this share of the budget is short: it need not wait behind long ones
    max_passes           short prompts that may go before a long one that lacks a row or blocks
    speculation          how many guesses a step may check
    chunked_prefill      False: a prompt is computed in one step or waits
    kv_cache             False: every step computes its sequences from their first token; no prompt is chunked then
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    overlap: bool = False
    watermark: float = 0.01
    max_upcoming: int = 8
    short_share: float = 0.25
    max_passes: int = 4
    chunked_prefill: bool = True
    kv_cache: bool = True
    speculation: Speculation = OFF

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt is computed in one step or not at all."""
        return not (self.chunked_prefill and self.kv_cache)


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow.

    prompt_tokens           prompts of admitted requests; a forked choice brings none
    prefix_queries_tokens   prompt tokens looked up at first admission, and of those prefix_hits_tokens found
    recomputed_tokens       positions computed again after a preemption, whether or not their request ends well
    prefill_chunks          pieces in which prompts and lost positions were computed
    swaps_out, swaps_in     of the preemptions, those that kept their KV on the host; those of them that came back
    host_hits_tokens        of prefix_hits_tokens, those copied back from the host
    overshoot_tokens        computed beyond a request's end and thrown away
    draft_tokens            guesses that were checked, and of those accepted_tokens that were right
    """

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    host_hits_tokens: int = 0
    overshoot_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prefill_chunks: int = 0
    forks: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_deadline: int = 0
    finished_error: int = 0

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
