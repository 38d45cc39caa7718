"""The engine's loop without sockets: requests in, steps run, messages out. The only place that knows both towers.

    step()   expire deadlines -> schedule -> launch N -> collect N - 1 (overlap) or N -> expire -> commit -> messages

The CPU waits in `collect` and nowhere else. Every accepted choice gets exactly one `Finished`, whatever happens:
a broken step fails the requests it concerns; a broken runner ends the engine with EngineFault.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any

from steelyard.cache.manager import CacheManager
from steelyard.core.request import Emitted, Event, FinishReason, Request
from steelyard.core.step import Runner, Step, StepPlan
from steelyard.engine import reporting
from steelyard.engine.admission import check_submit, make_choices, refusal
from steelyard.engine.grammars import Grammars
from steelyard.engine.ledgers import Ledgers
from steelyard.engine.options import EngineFault, EngineOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.wire.messages import (
    Accepted,
    Answer,
    Ask,
    Control,
    Deltas,
    Finished,
    FromEngine,
    Ready,
    Refused,
    Status,
    Stop,
    Submit,
)

_log = logging.getLogger(__name__)

STOP_REASONS = {
    "stop_string": FinishReason.STOP,
    "disconnect": FinishReason.ABORT,
    "abort": FinishReason.ABORT,
    "deadline": FinishReason.DEADLINE,
}
"""What a `Stop` message's reason makes of a choice's end."""


class Engine:
    """Serves requests on one runner. Not thread-safe: one loop calls it.

    draining   nothing new is taken; what is live goes on
    halted     everything was stopped by `Control("halt")`
    broken     the invariant found broken, or ""; the engine drains then
    progressed whether the last `step` launched or collected anything
    """

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        scheduler: Scheduler,
        options: EngineOptions | None = None,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        ledgers: Ledgers | None = None,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.scheduler = scheduler
        self.grammars = Grammars(runner.caps.vocab_size, before_compile=scheduler.faults.before_compile)
        self.options = options or EngineOptions()
        self.clock_ns = clock_ns
        self.ledgers = (ledgers or Ledgers(scheduler.max_num_seqs, clock_ns())).over(cache, scheduler)
        self.draining = False
        self.halted = False
        self.broken = ""
        self.progressed = False
        self._live: dict[str, dict[int, Request]] = {}
        self._paused: set[str] = set()
        self._in_flight: deque[Step] = deque()
        self._max_ahead = 1 if scheduler.options.overlap else 0
        self._deadlines: list[tuple[int, str, int, bool]] = []  # the last: only while it has no token
        self._num_seeds = 0
        self._progress_ns = clock_ns()
        self._checked_idle = False

    # requests

    def submit(self, submit: Submit, arrived_ns: int | None = None) -> Accepted | Refused:
        """Take a request in, all its choices or none. Its time begins at `arrived_ns`, before a step that ran then."""
        now_ns = self.clock_ns()
        start_ns = now_ns if arrived_ns is None else min(arrived_ns, now_ns)
        if self.draining:
            return Refused(submit.id, 503, "overloaded", "the engine is shutting down: try another", None, 1.0)
        if submit.id in self._live:
            message = f"id: {submit.id!r} is being served; use another"
            return Refused(submit.id, 409, "duplicate_id", message, "id")
        if was_idle := not self.has_work:
            self._progress_ns = now_ns
        choices: list[Request] = []
        try:
            check_submit(submit, self.runner.caps)
            self.grammars.check(submit.grammar)
            seed = submit.sampling.seed if submit.sampling.seed is not None else self._next_seed()
            for choice in make_choices(submit, seed, self.options.eos_token_ids, start_ns):
                self.ledgers.opened(choice, was_idle)
                self.scheduler.add(choice, now_ns)
                choices.append(choice)
        except Exception as error:
            for choice in choices:
                self.scheduler.stop(choice.key, FinishReason.ABORT, now_ns)
            return refusal(submit.id, error)
        self._live[submit.id] = {choice.index: choice for choice in choices}
        self.grammars.open(choices, submit.grammar, submit.sampling.min_tokens)
        for choice in choices:
            if choice.deadline_ns is not None:
                heappush(self._deadlines, (choice.deadline_ns, *choice.key, False))
            if submit.first_token_in_ns is not None:
                heappush(self._deadlines, (start_ns + submit.first_token_in_ns, *choice.key, True))
        self._checked_idle = False
        return Accepted(submit.id, choices[0].max_tokens)

    def stop(self, stop: Stop) -> list[FromEngine]:
        """End a choice, or all of a request (index -1); one that has ended already is no error."""
        reason = STOP_REASONS.get(stop.reason, FinishReason.ABORT)
        indexes = list(self._live.get(stop.id, ())) if stop.index < 0 else [stop.index]
        now_ns, events = self.clock_ns(), list[Event]()
        try:
            for index in indexes:
                events += self.scheduler.stop((stop.id, index), reason, now_ns, stop.keep)
        except Exception as error:
            return self._messages(events) + self._fail_all("stopping", error)
        return self._messages(events)

    def pause(self, request_id: str) -> None:
        """Compute nothing for this request until `resume`: its reader is too slow."""
        if request_id in self._live:
            self._paused.add(request_id)
            self.scheduler.pause(request_id, self.clock_ns())

    def resume(self, request_id: str) -> None:
        if request_id in self._paused:
            self._paused.discard(request_id)
            self.scheduler.resume(request_id, self.clock_ns())

    def ask(self, ask: Ask) -> Answer:
        """Answer a question about the engine; an unknown one with {"error": ...}."""
        return Answer(ask.id, reporting.answer(self, ask.what))

    def control(self, control: Control) -> list[FromEngine]:
        """drain, halt or drop_cache; what is unknown is logged."""
        match control.what:
            case "drain":
                self.draining = True
            case "halt":
                self.draining = self.halted = True
                return [m for id in list(self._live) for m in self.stop(Stop(id, -1, "abort"))]
            case "drop_cache":
                num_blocks = self.cache.drop(control.namespace or None)
                _log.info("dropped %d cached blocks", num_blocks)
            case _:
                _log.warning("unknown control %r", control.what)
        return []

    # steps

    @property
    def has_work(self) -> bool:
        """Whether a request is live or a step is in flight."""
        return bool(self._live or self._in_flight)

    @property
    def next_deadline_ns(self) -> int | None:
        """When the next live request must have ended, by `clock_ns`."""
        while self._deadlines and not self._is_due_by(*self._deadlines[0][1:]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def step(self) -> list[FromEngine]:
        """Run the loop once: at most one launch and one collect. Raises EngineFault if the runner failed."""
        messages = self._messages(self._expire() + self._poll_grammars())
        launched = masked = False
        try:
            plan = self.scheduler.schedule(self.clock_ns())
        except Exception as error:
            plan = None
            messages += self._fail_all("scheduling", error)
        if plan is not None:
            self._in_flight.append(self._run("launch", self.runner.launch, plan))
            self.ledgers.launched(plan, self.scheduler.request_at)  # a device is at work already
            launched, masked = True, bool(plan.masked)
        collected = bool(self._in_flight) and (not launched or len(self._in_flight) > self._max_ahead)
        behind = len(self._in_flight) > 1  # the masks of this step hang on the tokens of the one before
        if masked and not behind:
            self._sample(plan)
        if collected:
            messages += self._collect()
        if masked and behind:
            self._sample(plan)
        self.progressed = launched or collected
        if self.progressed or not self._is_due():
            self._progress_ns = self.clock_ns()
        if self.options.check_invariants:
            self.check()
        return messages

    def when_idle(self) -> None:
        """Called when nothing is to be done: the invariants are checked once in each idle period."""
        if not self._checked_idle and not self.has_work:
            self._checked_idle = True
            self.check()

    def check(self) -> bool:
        """Whether the books agree. If they do not, the state is logged and the engine drains."""
        try:
            self.scheduler.check()
            assert self.scheduler.in_flight == len(self._in_flight), "steps in flight disagree"
            keys = sum(len(choices) for choices in self._live.values())
            assert self.scheduler.num_running + self.scheduler.num_waiting == keys, "live requests disagree"
        except AssertionError as error:
            if not self.broken:
                self.broken = str(error) or "an assertion failed"
                self.draining = True
                _log.critical("broken invariant, draining: %s\n%s", self.broken, reporting.dump(self), exc_info=error)
            return False
        return True

    # reports

    def ready(self) -> Ready:
        return reporting.ready(self)

    def status(self) -> Status:
        return reporting.status(self)

    def stalled_ns(self, now_ns: int) -> int:
        """How long no step has made progress although a request could run; 0 while all is well."""
        return max(0, now_ns - self._progress_ns) if self._is_due() and not self.progressed else 0

    def live_requests(self) -> Iterable[Request]:
        return (choice for choices in self._live.values() for choice in choices.values())

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    # inside

    def _is_due(self) -> bool:
        """Whether a step should make progress: a step is in flight, or somebody is live whose reader keeps up."""
        return bool(self._in_flight) or len(self._live) > len(self._paused)

    def _is_due_by(self, request_id: str, index: int, first_only: bool) -> bool:
        """Whether a deadline still concerns somebody."""
        choice = self._live.get(request_id, {}).get(index)
        return choice is not None and not (first_only and choice.num_generated)

    def _next_seed(self) -> int:
        """A seed for a request without one: the same engine seed and order of requests give the same seeds."""
        self._num_seeds += 1
        words = f"{self.options.seed}/{self._num_seeds}".encode()
        return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")

    def _expire(self) -> list[Event]:
        """End what is past its deadline: before a step is planned, so that who waits is never computed, and after."""
        events: list[Event] = []
        if self.next_deadline_ns is None:
            return events
        now_ns = self.clock_ns()
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, request_id, index, first_only = heappop(self._deadlines)
            if not self._is_due_by(request_id, index, first_only):
                continue
            events += self.scheduler.stop((request_id, index), FinishReason.DEADLINE, now_ns)
        return events

    def _poll_grammars(self) -> list[Event]:
        """End the requests whose grammar failed; the others may be scheduled from now on."""
        events: list[Event] = []
        for request, why in self.grammars.poll():
            request.detail = f"the grammar failed: {why}"
            events += self.scheduler.stop(request.key, FinishReason.ERROR, self.clock_ns())
        return events

    def _sample(self, plan: StepPlan | None) -> None:
        assert plan is not None
        masks = self.grammars.masks(plan, self.scheduler.request_at)
        self._run("sample", lambda step: self.runner.sample(step, masks), self._in_flight[-1])

    def _collect(self) -> list[FromEngine]:
        result = self._run("collect", self.runner.collect, self._in_flight.popleft())
        expired = self._messages(self._expire())  # a token that is ready only now is too late
        now_ns = self.clock_ns()
        try:
            self.ledgers.committed(result, now_ns, self.scheduler.request_at)
            if self.scheduler.weighs:
                self.ledgers.charge(self.scheduler.charge)
            return expired + self._messages(self.scheduler.commit(result, now_ns))
        except Exception as error:
            return expired + self._fail_all("committing", error)

    def _run(self, what: str, call: Callable[[Any], Any], argument: Any) -> Any:
        """Call the runner; it is past help if it raises."""
        try:
            return call(argument)
        except Exception as error:
            _log.critical("the runner failed in %s\n%s", what, reporting.dump(self), exc_info=error)
            raise EngineFault(f"the runner failed in {what}: {type(error).__name__}: {error}") from error

    def _messages(self, events: list[Event]) -> list[FromEngine]:
        """One Deltas with all that was emitted, then the ends."""
        if not events:
            return []
        for event in events:
            if isinstance(event, Emitted) and event.request.has_grammar:
                self.grammars.accept(event.request, event.ids)
        emitted = [reporting.delta(event) for event in events if isinstance(event, Emitted)]
        ended = [event.request for event in events if not isinstance(event, Emitted)]
        messages: list[FromEngine] = [Deltas(emitted)] if emitted else []
        return messages + [self._finished(request) for request in ended]

    def _finished(self, request: Request) -> Finished:
        choices = self._live[request.id]
        del choices[request.index]
        self.grammars.close(request)
        if not choices:
            del self._live[request.id]
            self._paused.discard(request.id)
        return reporting.finished(request, self.ledgers.account(request))

    def _fail_all(self, what: str, error: Exception) -> list[FromEngine]:
        """A step broke in the bookkeeping: which requests it spoilt is unknown, so all that are live end."""
        _log.error("%s failed, its requests end\n%s", what, reporting.dump(self), exc_info=error)
        now_ns = self.clock_ns()
        messages: list[FromEngine] = []
        for request in list(self.live_requests()):
            request.detail = f"{what} failed in the engine: {type(error).__name__}: {error}"
            request.reason = FinishReason.ERROR
            try:
                self.scheduler.stop(request.key, FinishReason.ERROR, now_ns)
            except Exception as second:
                _log.error("%r could not be stopped", request, exc_info=second)
            messages.append(self._finished(request))
        self.check()
        return messages
