"""The engine's loop in its smallest form: a scheduler and a runner on a virtual clock. No sockets, no threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from steelyard.core.request import Emitted, Ended, Event, Request
from steelyard.core.step import Runner, Step, StepPlan, StepResult
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.clock import VirtualClock


class Books(Protocol):
    """The ledgers, as the engine tells them; see `engine.ledgers`."""

    def opened(self, request: Request, was_idle: bool) -> None: ...

    def launched(self, plan: StepPlan, request_at: Callable[[int], Request]) -> None: ...

    def committed(self, result: StepResult, now_ns: int, request_at: Callable[[int], Request]) -> None: ...

    def charge(self, charge: Callable[[str, int, int], None]) -> None: ...


class Simulation:
    """Launches what the scheduler plans and commits what comes back, oldest first.

    host_ns      time each call of `step` takes on the host
    step_ns      device time of a plan, added before it is collected
    outputs      generated ids by request key, as emitted;  ended: requests in the order of their `Ended` events
    plans        every plan launched, in order
    books        kept as the engine keeps them; they charge tenants under an order that weighs
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: VirtualClock,
        *,
        host_ns: int = 100,
        step_ns: Callable[[StepPlan], int] = lambda plan: 0,
        books: Books | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.ended: list[Request] = []
        self.plans: list[StepPlan] = []
        self.books = books
        self._host_ns = host_ns
        self._step_ns = step_ns
        self._launched: deque[tuple[StepPlan, Step]] = deque()

    def add(self, request: Request) -> None:
        if self.books is not None:
            self.books.opened(request, not self.scheduler.has_work)
        self.scheduler.add(request, self.clock())
        self.outputs[request.key] = []

    def step(self) -> bool:
        """Launch one plan if there is one, then commit a step if none can be added. False: nothing happened."""
        plan = self.launch()
        if plan is not None and self.scheduler.options.overlap and len(self._launched) < 2:
            return True
        return self.commit() or plan is not None

    def launch(self) -> StepPlan | None:
        """Ask for a plan and launch it."""
        self.clock.advance(self._host_ns)
        plan = self.scheduler.schedule(self.clock())
        if plan is not None:
            self.plans.append(plan)
            if self.books is not None:
                self.books.launched(plan, self.scheduler.request_at)
            self._launched.append((plan, self.runner.launch(plan)))
        return plan

    def commit(self) -> bool:
        """Collect and commit the oldest step in flight; False if there is none."""
        if not self._launched:
            return False
        plan, step = self._launched.popleft()
        self.clock.advance(self._step_ns(plan))
        result, now_ns = self.runner.collect(step), self.clock()
        if self.books is not None:
            self.books.committed(result, now_ns, self.scheduler.request_at)
            if self.scheduler.weighs:
                self.books.charge(self.scheduler.charge)
        self.take(self.scheduler.commit(result, now_ns))
        return True

    def take(self, events: list[Event]) -> None:
        """Record events, from a commit or from stopping a request."""
        for event in events:
            if isinstance(event, Emitted):
                self.outputs[event.request.key] += event.ids
            elif isinstance(event, Ended):
                self.ended.append(event.request)

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing is live. Fails if that takes more than `max_steps`, or if no step makes progress."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            assert self.step(), f"stuck: {self.scheduler.waiting_by_reason()}, {self.scheduler.num_running} running"
        raise AssertionError(f"not done after {max_steps} steps")
