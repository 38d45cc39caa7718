"""Known delays, injected in one place on a virtual clock, move only their own account, by the right amount."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steelyard.core.step import StepPlan, StepResult, StepTiming
from steelyard.engine.engine import Engine
from steelyard.ledger.book import CPU_LATE
from steelyard.scheduler.protocols import Faults
from steelyard.sim.clock import VirtualClock
from steelyard.sim.scripted import Script, ScriptedRunner
from steelyard.wire.messages import Ask
from tests.engine.engine_harness import Harness

PREFILL_NS = 1_000
DECODE_NS = 100


class Stall(Faults):
    """The scheduler takes `stall_ns` more before step 5."""

    clock: VirtualClock
    stall_ns = 0

    def before_step(self, step_id: int) -> None:
        if step_id == 5:
            self.clock.advance(self.stall_ns)


class PaddedRunner(ScriptedRunner):
    """Claims that each step computed `padded_tokens` more."""

    padded_tokens = 0

    def collect(self, step: StepResult) -> StepResult:
        result = super().collect(step)
        t = result.timing
        timing = StepTiming(t.launch_ns, t.done_ns, t.device_ns, padded_tokens=self.padded_tokens)
        return StepResult(result.id, result.rows, timing, result.prompt_logprobs)


def serve(
    *, stall_ns: int = 0, max_rows: int = 8, num_blocks: int = 64, long_prompt: int = 0, **caps: Any
) -> dict[str, Any]:
    """Two requests that decode and, if wanted, a long prompt among them; ledgers and ends by request."""

    def took(plan: StepPlan) -> None:
        harness.clock.advance(DECODE_NS + sum(PREFILL_NS * work.num_new for work in plan.work if work.num_new > 1))

    faults = Stall()
    faults.stall_ns = stall_ns
    harness = Harness(
        faults=faults,
        make_runner=lambda caps, clock: ScriptedRunner(caps, Script(2, (7,) * 500), delay=took, clock=clock),
        max_rows=max_rows,
        num_blocks=(num_blocks,),
        **caps,
    )
    faults.clock = harness.clock
    engine: Engine = harness.engine
    for name in ("a", "b"):
        harness.submit(name, [ord(name)] * 8, max_tokens=40)
    for number in range(1, 10_000):
        if number == 10 and long_prompt:
            harness.submit("long", [9] * long_prompt, max_tokens=2)
        if not engine.has_work:
            break
        harness.hear(engine.step())
    harness.assert_clean()
    return {"ends": {id: end.ledger for (id, _), end in harness.ends.items()}, "harness": harness}


def grown(with_: dict[str, Any], without: dict[str, Any], name: str) -> dict[str, int]:
    """Accounts of a request that differ, and by how much."""
    a, b = with_["ends"][name], without["ends"][name]
    return {s: a.get(s, 0) - b.get(s, 0) for s in {*a, *b} if a.get(s, 0) != b.get(s, 0)}


def test_a_stalled_scheduler_is_the_engines_gap() -> None:
    plain, stalled = serve(), serve(stall_ns=12_345)
    for name in ("a", "b"):
        assert grown(stalled, plain, name) == {"engine_gap": 12_345}
    gaps = [book["harness"].engine.ledgers.book.totals.gaps_ns.get(CPU_LATE, 0) for book in (plain, stalled)]
    assert gaps[1] - gaps[0] == 12_345


def test_too_few_rows_are_a_wait_for_a_slot() -> None:
    changed = grown(serve(max_rows=1), serve(), "b")
    alone_ns = -8 * PREFILL_NS  # its prompt no longer waits for the other's in the same step
    assert changed == {"wait_slot": 8 * PREFILL_NS + 40 * DECODE_NS, "prefill": alone_ns}


def test_a_shrunken_pool_is_a_wait_for_blocks_or_a_displacement() -> None:
    plain, small = serve(), serve(num_blocks=12)
    assert not grown(small, plain, "a")
    changed = grown(small, plain, "b")
    assert set(changed) == {"preempted", "recompute", "decode"}
    num_again = small["harness"].ends["b", 0].usage.recomputed_tokens
    assert changed["recompute"] - DECODE_NS == (num_again + 1) * PREFILL_NS  # and the token that was not known yet
    assert changed["decode"] == -DECODE_NS


def test_who_waits_for_blocks_is_told_who_holds_them() -> None:
    harness = serve(num_blocks=12)["harness"]
    harness.engine.options = replace(harness.engine.options, block_bytes=(100,))
    [waited] = harness.engine.ask(Ask("q", "request b")).value
    held = waited["kv_held"]
    assert held["num_requests"] == 1 and 0 < held["blocks"][0] <= 12
    assert held["bytes"] == held["blocks"][0] * 100
    [other] = harness.engine.ask(Ask("q", "request a")).value
    assert other["kv_held"] is None


def test_a_long_prompt_among_decodes_is_seen_in_their_steps_and_named() -> None:
    plain, crowded = serve(), serve(long_prompt=120)
    for name in ("a", "b"):
        assert grown(crowded, plain, name) == {"decode": 120 * PREFILL_NS}
    harness = crowded["harness"]
    [choice] = harness.engine.ask(Ask("q", "request a")).value
    slowest = choice["slowest_steps"][0]
    assert slowest["kind"] == "decode" and slowest["causes"]["others_prefill_rows"] == 1
    assert slowest["causes"]["others_prefill_tokens"] > 20
    assert slowest["device_ns"] > 20 * PREFILL_NS


def test_a_prompt_of_16k_among_decodes_takes_from_each_what_its_chunks_took() -> None:
    large = {"max_model_len": 20_000, "max_batched_tokens": 2048, "num_blocks": 5_000}
    plain, crowded = serve(**large), serve(**large, long_prompt=16_384)
    for name in ("a", "b"):
        assert grown(crowded, plain, name) == {"decode": 16_384 * PREFILL_NS}
    [choice] = crowded["harness"].engine.ask(Ask("q", "request a")).value
    causes = choice["slowest_steps"][0]["causes"]
    assert (causes["others_prefill_rows"], causes["others_decode_rows"]) == (1, 1)
    assert causes["others_prefill_tokens"] == 2048 - 2


@pytest.mark.parametrize("padded_tokens", [0, 64])
def test_a_padded_graph_is_the_engines_cost(padded_tokens: int) -> None:
    def took(plan: StepPlan) -> None:
        tokens = plan.num_tokens + padded_tokens
        harness.clock.advance(1_000 + 50 * tokens)

    def make(caps: Any, clock: VirtualClock) -> PaddedRunner:
        runner = PaddedRunner(caps, Script(2, (7,) * 500), delay=took, clock=clock)
        runner.padded_tokens = padded_tokens
        return runner

    harness = Harness(make_runner=make)
    for i in range(90):
        harness.submit(f"r{i}", [i] * (3 + i % 7), max_tokens=4 + i % 5)
        harness.hear(harness.engine.step())
    harness.run()
    last = harness.engine.ledgers.book.entries[-1]
    assert last.rates.is_known
    assert last.engine_ns == pytest.approx(50 * padded_tokens, abs=0.05 * last.device_ns)
