"""Open-loop load on a scheduler over a virtual clock: requests arrive when they are due, whatever has been served."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from steelyard.core.request import Request
from steelyard.core.step import StepPlan
from steelyard.sim.scripted import Script, ScriptedRunner
from steelyard.sim.simulation import Simulation
from tests.scheduler.scheduler_rig import Rig, make_request

STEP_NS, TOKEN_NS = 2_000_000, 10_000
"""A step reads the weights (2 ms), and each token adds 10 us: 256 tokens take 4.56 ms."""


def step_ns(plan: StepPlan) -> int:
    return STEP_NS + TOKEN_NS * plan.num_tokens


@dataclass(frozen=True)
class Arrival:
    """A request to come. `prompt` makes two prompts differ."""

    at_ns: int
    prompt_len: int
    max_tokens: int
    tenant: int = 0
    fields: dict[str, int | float] = field(default_factory=dict)


class Load:
    """A run; subclasses look at it after each step."""

    def __init__(self, rig: Rig, policy: str) -> None:
        self.simulation = build(rig, policy)
        self.requests: list[Request] = []

    def run(self, arrivals: list[Arrival], until_ns: int) -> None:
        """Serve what arrives until the clock shows `until_ns`, or everything is served."""
        simulation, due = self.simulation, sorted(arrivals, key=lambda a: a.at_ns)
        while simulation.clock() < until_ns:
            while due and due[0].at_ns <= simulation.clock():
                self._add(due.pop(0))
            if not simulation.scheduler.has_work:
                if not due:
                    return
                simulation.clock.advance(due[0].at_ns - simulation.clock())
                continue
            assert simulation.step(), "stuck"
            self.after_step()

    def after_step(self) -> None:
        """For a test to look."""

    def _add(self, arrival: Arrival) -> None:
        number = len(self.requests)
        rng = random.Random(number)
        prompt = [rng.randrange(1000) for _ in range(arrival.prompt_len)]
        request = make_request(
            str(number), prompt, arrival.max_tokens, tenant=arrival.tenant, now_ns=arrival.at_ns, **arrival.fields
        )
        self.requests.append(request)
        self.simulation.add(request)


def build(rig: Rig, policy: str) -> Simulation:
    """A scheduler over a runner that answers at once and takes the time of `step_ns` on the clock."""
    base = replace(rig, caching=False).simulation(policy=policy, step_ns=step_ns)
    runner = ScriptedRunner(rig.caps(), Script(eos_token_id=0), clock=base.clock)
    return Simulation(base.scheduler, runner, base.clock, step_ns=step_ns, books=base.books)
