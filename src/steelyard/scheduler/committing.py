"""What a finished step changes: lengths, tokens, published blocks, ends. The decode path is kept short."""

from __future__ import annotations

from steelyard.core.request import Emitted, Event, FinishReason, Request
from steelyard.core.step import RowOut, RowWork, StepResult
from steelyard.core.timed import State
from steelyard.scheduler.live import Live, PlannedStep
from steelyard.scheduler.planning import apply_states
from steelyard.scheduler.protocols import Faults
from steelyard.scheduler.rows import Resident


class Committer:
    """Applies results to `Live`, in launch order. Rows of ended requests are counted as overshoot and dropped."""

    def __init__(self, live: Live, faults: Faults) -> None:
        self._live = live
        self._faults = faults
        self._block_size = live.cache.block_size

    def commit(self, result: StepResult, now_ns: int) -> list[Event]:
        live = self._live
        step = live.in_flight.popleft()
        assert step.plan.id == result.id, f"step {result.id} committed, step {step.plan.id} is due"
        live.gaps.commit(now_ns, result.timing.device_ns)
        live.counters.steps += 1
        for request in step.swapped:
            if request.state is State.SWAP_OUT:
                request.to(State.SWAPPED, now_ns)
        events: list[Event] = []
        for row, why in result.failed:
            self._fail(live.rows.by_row[row], step.works[row], why, now_ns, events)
        self._rows(result, step, now_ns, events)
        if len(result.rows) + len(result.failed) < len(step.works):
            self._silent_rows(result, step, now_ns, events)
        if live.in_flight:
            apply_states(live, live.in_flight[0].states, now_ns)
            live.in_flight[0].states = []
        return events

    def _rows(self, result: StepResult, step: PlannedStep, now_ns: int, events: list[Event]) -> None:
        """Every row that answered. A decode that goes on costs an append and an event."""
        works, by_row, size = step.works, self._live.rows.by_row, self._block_size
        num_decoded = 0
        for out in result.rows:
            resident, work = by_row[out.row], works[out.row]
            if resident is None or resident.epoch != out.epoch:
                continue
            if resident.work_in_flight is work:
                resident.work_in_flight = None
            if resident.ended:
                self._live.land(resident, work.num_new, now_ns)
                continue
            request, ids = resident.request, out.ids
            tokens = request.tokens
            if work.num_drafts:
                self._checked(resident, work, out, now_ns, events)
                continue
            if len(tokens) == resident.known_len or len(ids) != 1:
                self._prefilled(resident, work, out, result, now_ns, events)
                continue
            request.num_computed = end = work.start + work.num_new
            if work.num_new > 1:  # without a KV cache: all but the last position were computed before
                request.num_recomputed += work.num_new - 1
                self._live.counters.recomputed_tokens += work.num_new - 1
            tokens.append(ids[0])
            num_decoded += 1
            events.append(Emitted(request, ids, out.logprobs))
            if end % size == 0:
                self._publish(request)
            if ids[0] in request.stop_ids or end + 1 >= resident.end_len:
                self._end_if_due(resident, now_ns, events)
        self._live.counters.generation_tokens += num_decoded

    def _prefilled(
        self,
        resident: Resident,
        work: RowWork,
        out: RowOut,
        result: StepResult,
        now_ns: int,
        events: list[Event],
    ) -> None:
        """A chunk was computed; the last one brings the next token, or the end of a request that is pooled."""
        live, request = self._live, resident.request
        end = work.start + work.num_new
        num_again = max(0, min(end, request.recompute_until) - work.start)
        request.num_recomputed += num_again
        live.counters.recomputed_tokens += num_again
        live.counters.prefill_chunks += 1
        request.num_computed = end
        if prompt_logprobs := result.prompt_logprobs.get(out.row):
            lacking = request.prompt_len - 1 - len(request.prompt_logprobs)
            request.prompt_logprobs += prompt_logprobs[:lacking]
        self._publish(request)
        if request.pooling:
            self._pool(request, work, result, now_ns, events)
        if not out.ids:
            return
        if not request.num_generated:
            why = self._faults.before_first_token(request)
            if why is not None:
                request.detail = why
                events.append(live.end(request, FinishReason.ERROR, now_ns))
                return
            request.first_token_ns = now_ns
        self._append(resident, out, now_ns, events)

    def _pool(self, request: Request, work: RowWork, result: StepResult, now_ns: int, events: list[Event]) -> None:
        """Take the chunk's part of the vector; with the prompt's last position the request ends."""
        values = result.pooled.get(work.row)
        if values is not None:
            request.pooled.append((work.num_new, values))
        if request.num_computed == request.prompt_len:
            events.append(self._live.end(request, FinishReason.STOP, now_ns))

    def _checked(self, resident: Resident, work: RowWork, out: RowOut, now_ns: int, events: list[Event]) -> None:
        """A decode brought guesses: what agreed with them, and one more. KV of wrong guesses is written over later."""
        request, counters = resident.request, self._live.counters
        assert resident.guesser is not None and 1 <= len(out.ids) <= 1 + work.num_drafts
        num_accepted = len(out.ids) - 1
        request.num_drafted += work.num_drafts
        request.num_accepted += num_accepted
        counters.draft_tokens += work.num_drafts
        counters.accepted_tokens += num_accepted
        resident.guesser.learn(work.num_drafts, num_accepted)
        count = self._take(request, out, events)
        request.num_overshoot += len(out.ids) - count
        counters.overshoot_tokens += len(out.ids) - count
        request.num_computed = work.start + count
        if request.num_computed // self._block_size > work.start // self._block_size:
            self._publish(request)
        self._end_if_due(resident, now_ns, events)

    def _append(self, resident: Resident, out: RowOut, now_ns: int, events: list[Event]) -> None:
        """Append ids, and end the request if one of them is due to."""
        self._take(resident.request, out, events)
        self._end_if_due(resident, now_ns, events)

    def _take(self, request: Request, out: RowOut, events: list[Event]) -> int:
        """Append ids up to and including the one that ends the request; returns how many."""
        count, reason = 0, None
        while reason is None and count < len(out.ids):
            request.tokens.append(out.ids[count])
            count += 1
            reason = finish_reason(request)
        self._live.counters.generation_tokens += count
        logprobs = None if out.logprobs is None else out.logprobs[:count]
        events.append(Emitted(request, out.ids[:count], logprobs))
        return count

    def _publish(self, request: Request) -> None:
        live = self._live
        live.cache.commit(request, request.num_computed)
        if live.cache.has_windows:
            live.edits += live.cache.slide(request, request.num_computed)

    def _end_if_due(self, resident: Resident, now_ns: int, events: list[Event]) -> None:
        request = resident.request
        reason = finish_reason(request)
        if reason is None:
            return
        if reason is FinishReason.STOP:
            request.stop_token = request.tokens[-1]
        events.append(self._live.end(request, reason, now_ns))

    def _fail(self, resident: Resident | None, work: RowWork, why: str, now_ns: int, events: list[Event]) -> None:
        """The runner could not compute this row: its request ends, the others go on."""
        assert resident is not None, "a row in flight has no request"
        if resident.work_in_flight is work:
            resident.work_in_flight = None
        if resident.ended:
            self._live.land(resident, work.num_new, now_ns)
            return
        resident.request.detail = why
        events.append(self._live.end(resident.request, FinishReason.ERROR, now_ns))

    def _silent_rows(self, result: StepResult, step: PlannedStep, now_ns: int, events: list[Event]) -> None:
        """A row with neither answer nor failure cannot go on: its request ends with an error."""
        heard = {out.row for out in result.rows} | {row for row, _ in result.failed}
        for row, work in step.works.items():
            if row not in heard:
                self._fail(self._live.rows.by_row[row], work, "the runner gave no result", now_ns, events)


def finish_reason(request: Request) -> FinishReason | None:
    """Whether the last token ends the request. A stop id counts once `min_tokens` others came before it."""
    if request.tokens[-1] in request.stop_ids and request.num_generated > request.sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if request.num_generated >= request.max_tokens else None
