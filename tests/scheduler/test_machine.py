"""Random operations on scheduler + shadow runner: every invariant after each, everything ends, output equals solo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steelyard.core.request import FinishReason, Request
from steelyard.core.step import RowWork, StepPlan
from steelyard.errors import ContextLengthExceeded
from tests.scheduler.scheduler_rig import POLICIES, PerToken, Rig, assert_idle, make_choices, solo_output

RIGS = st.builds(
    Rig,
    num_blocks=st.integers(4, 24),
    block_size=st.just(4),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(3, 40),
    max_model_len=st.just(64),
    overlap=st.booleans(),
    caching=st.booleans(),
    windows=st.sampled_from([(None,), (None, 6), (9,), (4, None), ((6, 5),)]),
    vocab_size=st.just(40),
    num_host_blocks=st.sampled_from([0, 2, 6, 40]),
)
COSTS = st.sampled_from([None, PerToken(10, 1), PerToken(10, 9)])
"""Without coefficients and with the first all are swapped; with the last only prefixes are copied back."""

PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=30),
    st.sampled_from([[1] * 4, [1] * 8, [1] * 12, [1] * 16]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of two tenants come, pause, stop and fail in any order while steps are launched and committed."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.stopped: set[tuple[str, int]] = set()

    @initialize(rig=RIGS, fails=st.booleans(), policy=st.sampled_from(POLICIES), cost=COSTS)
    def build(self, rig: Rig, fails: bool, policy: str, cost: PerToken | None) -> None:
        def fail(plan: StepPlan, work: RowWork) -> str | None:
            return "not a number" if fails and (plan.id * 7 + work.row) % 23 == 0 else None

        self.rig = replace(rig, max_model_len=min(64, rig.num_blocks * 4 * 2))
        self.simulation = self.rig.simulation(fail=fail, policy=policy, cost=cost)
        self.scheduler = self.simulation.scheduler

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        tenant=st.integers(0, 1),
        priority=st.integers(0, 2),
        ttft_slo_ns=st.sampled_from([None, 1, 10_000, 100_000]),
        wants=st.sampled_from([{}, {}, {"prompt_logprobs": 1}, {"logprobs": 2}]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        tenant: int,
        priority: int,
        ttft_slo_ns: int | None,
        wants: dict[str, Any],
    ) -> None:
        choices = make_choices(
            f"r{len(self.requests)}",
            prompt,
            max_tokens,
            n,
            tenant=tenant,
            priority=priority,
            ttft_slo_ns=ttft_slo_ns,
            tpot_slo_ns=ttft_slo_ns,
            weight=1.0 + priority,
            sampling=wants,
            now_ns=self.simulation.clock(),
            stop_ids=frozenset({3, 4}),
        )
        for request in choices:
            try:
                self.simulation.add(request)
            except ContextLengthExceeded:
                continue
            self.requests.append(request)

    @rule()
    def launch(self) -> None:
        self.simulation.launch()

    @rule()
    def commit(self) -> None:
        self.simulation.commit()

    @rule()
    def step(self) -> None:
        self.simulation.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), keep=st.integers(-1, 3))
    def stop(self, data: st.DataObject, keep: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        reason = FinishReason.ABORT if keep < 0 else FinishReason.STOP
        if self.scheduler.get(request.key) is not None:
            self.stopped.add(request.key)
        self.simulation.take(self.scheduler.stop(request.key, reason, self.simulation.clock(), keep))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), resume=st.booleans())
    def pause_or_resume(self, data: st.DataObject, resume: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        (self.scheduler.resume if resume else self.scheduler.pause)(request.id, self.simulation.clock())

    @rule(tenant=st.integers(0, 1))
    def drop(self, tenant: int) -> None:
        self.scheduler.cache.drop(tenant.to_bytes(4, "little") if tenant else b"")

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    @invariant()
    def little_holds(self) -> None:
        if hasattr(self, "scheduler"):
            now_ns = self.simulation.clock()
            self.scheduler.settle(now_ns)
            books: Any = self.simulation.books
            states = books.little(now_ns)["states"]
            assert not any(state["difference_ns"] for state in states.values()), states

    def check_tokens(self, request: Request) -> None:
        """Every position a step computed is one of: prompt, a token's input, again, beyond the end, lost."""
        books: Any = self.simulation.books
        [tokens] = [a.tokens() for a in books.accounts.of(request.id) if a.request is request]
        own = tokens["prompt"] - tokens["cached"] - tokens["shared"] + tokens["generated"] - 1
        beside = tokens["recomputed"] + tokens["overshoot"] + tokens["lost"]
        assert tokens["computed"] == own + beside, f"{request}: {tokens}"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for request in self.requests:
            self.scheduler.resume(request.id, self.simulation.clock())
        self.simulation.run()
        assert_idle(self.simulation, self.requests)
        assert len(self.simulation.ended) == len(self.requests)
        for request in self.requests:
            if request.num_generated:
                self.check_tokens(request)
            output, alone = self.simulation.outputs[request.key], solo_output(request, self.rig)
            whole = request.key not in self.stopped and request.reason is not FinishReason.ERROR
            assert output == alone if whole else output == alone[: len(output)], f"{request} differs from solo"
            if whole and request.sampling.prompt_logprobs is not None:
                assert len(request.prompt_logprobs) == request.prompt_len - 1


class TestSchedulerMachine(SchedulerMachine.TestCase):
    settings = settings(max_examples=120, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestSchedulerMachineLong(SchedulerMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=80)
