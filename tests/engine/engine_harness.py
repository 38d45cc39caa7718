"""An engine over the shadow runner on a virtual clock, and a record of all it said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from steelyard.cache.manager import CacheManager
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import KvGroup, RowWork, Runner, RunnerCaps, StepPlan
from steelyard.engine.engine import Engine, EngineOptions
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.protocols import Faults
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.clock import VirtualClock
from steelyard.sim.shadow import ShadowRunner
from steelyard.wire.messages import Accepted, Deltas, Finished, FromEngine, Refused, Stop, Submit

CAPS = RunnerCaps(
    block_size=4,
    num_blocks=(64,),
    groups=(KvGroup(1),),
    max_rows=8,
    max_model_len=200,
    max_batched_tokens=32,
    vocab_size=1000,
    overlaps=False,
    fingerprint="shadow",
    kv_layout="shadow/4",
)
STEP_NS = 1_000_003


class Harness:
    """`ids` and `ends` by (id, index); `ended_ns` by the clock when the end was heard."""

    def __init__(
        self,
        *,
        overlap: bool = False,
        faults: Faults | None = None,
        fail: Callable[[StepPlan, RowWork], str | None] = lambda plan, work: None,
        seed: int = 0,
        eos: frozenset[int] = frozenset(),
        make_runner: Callable[[RunnerCaps, VirtualClock], Runner] | None = None,
        **caps: Any,
    ) -> None:
        self.clock = VirtualClock(10**9)
        self.caps = replace(CAPS, overlaps=overlap, **caps)
        if make_runner is not None:
            self.runner: Any = make_runner(self.caps, self.clock)
        else:
            self.runner = ShadowRunner(self.caps, fail=fail, clock=self.clock, step_ns=lambda plan: STEP_NS // 3)
        self.cache = CacheManager(self.caps, True)
        self.scheduler = Scheduler(self.caps, self.cache, SchedulerOptions(overlap=overlap), faults=faults)
        options = EngineOptions("shadow", eos, seed, check_invariants=True, config={"a": 1})
        self.engine = Engine(self.runner, self.cache, self.scheduler, options, clock_ns=self.clock)
        self.ids: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], Finished] = {}
        self.ended_ns: dict[tuple[str, int], int] = {}
        self.submitted_ns: dict[str, int] = {}

    def submit(self, id: str, tokens: list[int], *, deadline_in_ns: int | None = None, **sampling: Any) -> Accepted:
        answer = self.try_submit(id, tokens, deadline_in_ns=deadline_in_ns, **sampling)
        assert isinstance(answer, Accepted), answer
        return answer

    def try_submit(
        self, id: str, tokens: list[int], *, deadline_in_ns: int | None = None, **sampling: Any
    ) -> Accepted | Refused:
        self.submitted_ns[id] = self.clock.now_ns
        return self.engine.submit(Submit(id, tokens, SamplingParams(**sampling), deadline_in_ns=deadline_in_ns))

    def stop(self, id: str, index: int = -1, reason: str = "abort", keep: int = -1) -> None:
        self.hear(self.engine.stop(Stop(id, index, reason, keep)))

    def step(self) -> list[FromEngine]:
        self.clock.advance(STEP_NS // 7)
        messages = self.engine.step()
        self.hear(messages)
        self.clock.advance(STEP_NS)
        return messages

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def hear(self, messages: list[FromEngine]) -> None:
        assert sum(isinstance(m, Deltas) for m in messages) <= 1, "one Deltas a step"
        for message in messages:
            if isinstance(message, Deltas):
                for item in message.items:
                    assert (item.id, item.index) not in self.ends, "a delta after the end"
                    self.ids.setdefault((item.id, item.index), []).extend(item.ids)
            else:
                assert isinstance(message, Finished)
                key = (message.id, message.index)
                assert key not in self.ends, f"{key} ended twice"
                self.ends[key] = message
                self.ended_ns[key] = self.clock.now_ns

    def assert_clean(self) -> None:
        """Nothing is live, every block is free, every ledger closes to the nanosecond."""
        assert not self.engine.has_work
        assert self.engine.check(), self.engine.broken
        usage = self.cache.usage()
        assert usage.active == 0 and usage.free == usage.total
        for (id, index), end in self.ends.items():
            spent_ns = self.ended_ns[id, index] - self.submitted_ns[id]
            assert sum(end.ledger.values()) == spent_ns, f"{id}#{index}: {end.ledger} is not {spent_ns}"
