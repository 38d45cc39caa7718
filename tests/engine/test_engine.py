"""The engine over the shadow runner: every request ends once, in every state, and its ledger closes exactly."""

from __future__ import annotations

import random
from typing import Any

import pytest

from steelyard.core.request import Request
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import KvGroup, RunnerCaps, StepResult
from steelyard.engine.engine import EngineFault
from steelyard.scheduler.protocols import Faults
from steelyard.sim.clock import VirtualClock
from steelyard.sim.scripted import Script, ScriptedRunner
from steelyard.sim.shadow import ShadowRunner
from steelyard.wire.messages import Accepted, Ask, Control, Finished, Refused, Submit
from tests.engine.engine_harness import STEP_NS, Harness


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(length)]


def storm(harness: Harness, seed: int = 3, num_requests: int = 50) -> None:
    """Requests of many kinds, arriving while others run, with shared prefixes and n > 1, in a small pool."""
    rng = random.Random(seed)
    shared = prompt(rng, 24)
    waiting = []
    for i in range(num_requests):
        tokens = (shared if rng.random() < 0.4 else []) + prompt(rng, rng.randint(1, 60))
        waiting.append(
            (f"r{i}", tokens, {"max_tokens": rng.randint(1, 40), "n": rng.choice([1, 1, 1, 2, 3]), "seed": i})
        )
    while waiting or harness.engine.has_work:
        for _ in range(rng.randint(0, 2)):
            if waiting:
                id, tokens, sampling = waiting.pop(0)
                harness.submit(id, tokens, **sampling)
        harness.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_all_end_as_asked_and_every_ledger_closes(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    storm(harness)
    harness.assert_clean()
    counters = harness.scheduler.counters
    assert counters.preemptions > 0 and counters.forks > 0 and counters.prefix_hits_tokens > 0
    assert counters.prefill_chunks > len(harness.ends)
    assert all(end.reason == "length" for end in harness.ends.values())
    for key, ids in harness.ids.items():
        assert len(ids) == harness.ends[key].usage.completion_tokens
    assert any(end.usage.preemptions for end in harness.ends.values())


def test_overlap_changes_no_token() -> None:
    plain, overlapped = Harness(), Harness(overlap=True)
    storm(plain)
    storm(overlapped)
    assert plain.ids == overlapped.ids
    assert plain.scheduler.counters.preemptions > 0


def test_with_overlap_a_step_is_launched_before_the_one_before_it_is_collected() -> None:
    calls: list[str] = []

    def record(harness: Harness) -> list[str]:
        launch, collect = harness.runner.launch, harness.runner.collect
        calls.clear()
        harness.runner.launch = lambda plan: (calls.append(f"launch {plan.id}"), launch(plan))[1]
        harness.runner.collect = lambda step: (calls.append(f"collect {step.id}"), collect(step))[1]
        harness.submit("a", [1, 2, 3], max_tokens=3)
        harness.run()
        return list(calls)

    assert record(Harness()) == ["launch 1", "collect 1", "launch 2", "collect 2", "launch 3", "collect 3"]
    assert record(Harness(overlap=True)) == ["launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", range(12))
def test_a_request_can_be_stopped_in_every_state(overlap: bool, num_steps: int) -> None:
    """Waiting, in the middle of its prefill, decoding, in flight, preempted or over."""
    harness = Harness(overlap=overlap, num_blocks=(16,), max_rows=4)
    states = set()
    for i in range(6):
        harness.submit(f"r{i}", prompt(random.Random(i), 20), max_tokens=8, n=2, seed=i)
    for _ in range(num_steps):
        harness.step()
    for request in list(harness.engine.live_requests()):
        states.add(request.state.value)
        harness.stop(request.id, request.index, "disconnect")
        harness.stop(request.id, request.index, "disconnect")
    assert states or num_steps > 11
    harness.run()
    harness.assert_clean()
    assert len(harness.ends) == 12
    assert {end.reason for end in harness.ends.values()} <= {"abort", "length"}
    harness.submit("after", [1, 2, 3], max_tokens=2)
    harness.run()
    assert harness.ends["after", 0].reason == "length"


def test_stopping_a_request_stops_all_its_choices_and_only_its_own() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], n=3, max_tokens=50)
    harness.submit("b", [1, 2, 3], max_tokens=5)
    for _ in range(4):
        harness.step()
    harness.stop("a")
    assert [harness.ends["a", i].reason for i in range(3)] == ["abort"] * 3
    harness.run()
    assert harness.ends["b", 0].reason == "length"
    harness.assert_clean()


def test_a_stop_string_is_a_success_that_keeps_what_was_said() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], max_tokens=50)
    for _ in range(6):
        harness.step()
    harness.stop("a", 0, "stop_string", keep=2)
    end = harness.ends["a", 0]
    assert end.reason == "stop"
    assert end.usage.completion_tokens == 2
    assert end.usage.overshoot_tokens == len(harness.ids["a", 0]) - 2 > 0
    assert end.ledger["overshoot"] > 0
    harness.assert_clean()


def test_choices_draw_with_consecutive_seeds_and_share_the_prompt() -> None:
    harness = Harness()
    tokens = prompt(random.Random(1), 21)
    harness.submit("n", tokens, n=3, seed=7, max_tokens=6)
    harness.run()
    for i in range(3):
        harness.submit(f"solo{i}", tokens, seed=7 + i, max_tokens=6)
    harness.run()
    assert [harness.ids["n", i] for i in range(3)] == [harness.ids[f"solo{i}", 0] for i in range(3)]
    assert len({tuple(harness.ids["n", i]) for i in range(3)}) == 3
    assert harness.scheduler.counters.forks == 2


def test_seeds_are_derived_from_the_engines_own_and_the_order_of_requests() -> None:
    def texts(seed: int) -> list[list[int]]:
        harness = Harness(seed=seed)
        for i in range(3):
            harness.submit(f"r{i}", [5, 6, 7], max_tokens=6)
        harness.run()
        return [harness.ids[f"r{i}", 0] for i in range(3)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    first, second, third = texts(1)
    assert first != second != third


# deadlines


def test_a_deadline_that_passes_in_the_queue_costs_no_prefill() -> None:
    harness = Harness(max_rows=1)
    harness.submit("long", [1, 2, 3], max_tokens=60)
    harness.step()
    harness.submit("late", [4, 5, 6], max_tokens=10, deadline_in_ns=5 * STEP_NS)
    before = harness.scheduler.counters.prompt_tokens
    for _ in range(7):
        harness.step()
    end = harness.ends["late", 0]
    assert end.reason == "deadline"
    assert end.usage.completion_tokens == 0
    assert set(end.ledger) <= {"wait_step_boundary", "wait_slot"}
    assert harness.scheduler.counters.prompt_tokens == before
    harness.run()
    assert harness.ends["long", 0].reason == "length"
    harness.assert_clean()


def test_a_deadline_ends_a_running_request_with_what_it_has() -> None:
    harness = Harness(overlap=True)
    harness.submit("a", [1, 2, 3], max_tokens=100, n=2, deadline_in_ns=6 * STEP_NS)
    assert harness.engine.next_deadline_ns == harness.clock.now_ns + 6 * STEP_NS
    harness.run()
    assert {harness.ends["a", i].reason for i in range(2)} == {"deadline"}
    assert 0 < harness.ends["a", 0].usage.completion_tokens < 10
    harness.assert_clean()
    assert harness.engine.next_deadline_ns is None


def test_a_request_that_ends_in_time_leaves_no_deadline_behind() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], max_tokens=2, deadline_in_ns=1000 * STEP_NS)
    harness.run()
    assert harness.ends["a", 0].reason == "length"
    assert harness.engine.next_deadline_ns is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("limit", ["deadline_in_ns", "first_token_in_ns"])
@pytest.mark.parametrize("prompt_len", [3, 150])
def test_a_first_token_that_is_ready_too_late_is_not_given(overlap: bool, limit: str, prompt_len: int) -> None:
    harness = Harness(overlap=overlap, make_runner=SlowRunner)
    submit = Submit("late", [4] * prompt_len, SamplingParams(max_tokens=5), **{limit: STEP_NS // 2})
    harness.submitted_ns["late"] = harness.clock.now_ns
    assert isinstance(harness.engine.submit(submit), Accepted)
    harness.submit("other", [7], max_tokens=3)
    harness.run()
    assert harness.runner.num_steps > 0
    assert (harness.ends["late", 0].reason, harness.ends["late", 0].usage.completion_tokens) == ("deadline", 0)
    assert harness.ends["other", 0].reason == "length"
    assert ("late", 0) not in harness.ids
    assert harness.engine.check() and not harness.cache.usage().active


class SlowRunner(ShadowRunner):
    """Whose steps take STEP_NS, from launch to the end of `collect`."""

    def __init__(self, caps: RunnerCaps, clock: VirtualClock) -> None:
        super().__init__(caps, clock=clock, step_ns=lambda plan: STEP_NS)
        self.clock, self.num_steps = clock, 0

    def collect(self, step: StepResult) -> StepResult:
        self.clock.advance(STEP_NS)
        self.num_steps += 1
        return super().collect(step)


def test_a_deadline_for_the_first_token_ends_who_waits_and_nobody_who_has_one() -> None:
    harness = Harness(max_rows=1)
    first = Submit("a", [1, 2, 3], SamplingParams(max_tokens=20), first_token_in_ns=5 * STEP_NS)
    late = Submit("late", [4, 5, 6], SamplingParams(max_tokens=5), first_token_in_ns=5 * STEP_NS)
    for submit in (first, late):
        harness.submitted_ns[submit.id] = harness.clock.now_ns
        assert isinstance(harness.engine.submit(submit), Accepted)
    harness.run()
    assert (harness.ends["a", 0].reason, harness.ends["a", 0].usage.completion_tokens) == ("length", 20)
    assert (harness.ends["late", 0].reason, harness.ends["late", 0].usage.completion_tokens) == ("deadline", 0)
    assert harness.engine.next_deadline_ns is None
    harness.assert_clean()


# refusals


def refused(answer: Accepted | Refused) -> Refused:
    assert isinstance(answer, Refused)
    return answer


def test_bad_requests_are_refused_with_field_and_limit_and_leave_nothing() -> None:
    harness = Harness()
    empty = refused(harness.try_submit("e", []))
    assert (empty.status, empty.param) == (400, "prompt")
    for bad in (-1, 1000):
        answer = refused(harness.try_submit("v", [1, bad, 2]))
        assert answer.status == 400 and answer.param == "prompt"
        assert "between 0 and 999" in answer.message and f"got {bad} at position 1" in answer.message
    assert refused(harness.try_submit("s", [1], stop_token_ids=(1000,))).param == "stop_token_ids"
    assert refused(harness.try_submit("b", [1], logit_bias=((-1, 1.0),))).param == "logit_bias"
    long = refused(harness.try_submit("l", [1] * 190, max_tokens=11))
    assert long.code == "context_length_exceeded"
    assert all(number in long.message for number in ("190", "11", "200"))
    for submit in (
        Submit("h", [1] * 4, SamplingParams(), block_hashes=[b"short"]),
        Submit("h", [1] * 4, SamplingParams(), block_hashes=[b"x" * 32] * 2),
        Submit("w", [1] * 4, SamplingParams(), want="embedding"),
    ):
        assert refused(harness.engine.submit(submit)).status == 400
    harness.assert_clean()
    assert not harness.engine.live_requests() or not list(harness.engine.live_requests())


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    harness = Harness()
    harness.submit("a", [1, 2], max_tokens=3, n=2)
    answer = refused(harness.try_submit("a", [1, 2]))
    assert (answer.status, answer.param) == (409, "id")
    harness.run()
    assert len(harness.ends) == 2
    first = dict(harness.ends)
    harness.ends.clear()
    harness.submit("a", [1, 2], max_tokens=3)
    harness.run()
    assert harness.ends["a", 0].reason == "length" and first


def test_max_tokens_left_open_is_clamped_to_what_fits() -> None:
    harness = Harness(max_model_len=30)
    assert harness.submit("a", [1] * 10).max_tokens == 20
    harness.run()
    assert harness.ends["a", 0].usage.completion_tokens == 20


def test_a_fault_in_taking_a_request_in_is_said_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    add = harness.scheduler.add

    def broken(request: Request, now_ns: int) -> None:
        if request.index == 1:
            raise ZeroDivisionError("in add")
        add(request, now_ns)

    monkeypatch.setattr(harness.scheduler, "add", broken)
    answer = refused(harness.try_submit("a", [1, 2], n=2))
    assert answer.status == 500 and "in add" in answer.message
    harness.submit("b", [1, 2], max_tokens=2)
    harness.run()
    harness.assert_clean()


# failures


def test_a_failed_row_ends_its_request_and_no_other() -> None:
    harness = Harness(fail=lambda plan, work: "not finite" if plan.id == 4 and work.row == 1 else None)
    for i in range(3):
        harness.submit(f"r{i}", [1, 2, i], max_tokens=10)
    harness.run()
    failed = [end for end in harness.ends.values() if end.reason == "error"]
    assert [end.message for end in failed] == ["not finite"]
    assert sorted(end.reason for end in harness.ends.values()) == ["error", "length", "length"]
    harness.assert_clean()


class BrokenStep(Faults):
    """Raises at one step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def before_step(self, step_id: int) -> None:
        if step_id == self.at:
            self.at = -1
            raise RuntimeError("planned to fail")


@pytest.mark.parametrize("overlap", [False, True])
def test_an_exception_in_scheduling_fails_the_live_requests_and_the_engine_lives(overlap: bool) -> None:
    harness = Harness(faults=BrokenStep(4), overlap=overlap)
    harness.submit("a", [1, 2, 3], max_tokens=20, n=2)
    harness.submit("b", [1, 2, 3], max_tokens=20)
    harness.run()
    assert len(harness.ends) == 3
    assert all(end.reason == "error" and "planned to fail" in end.message for end in harness.ends.values())
    harness.submit("c", [1, 2, 3], max_tokens=5)
    harness.run()
    assert harness.ends["c", 0].reason == "length"
    harness.assert_clean()


class BrokenFirstToken(Faults):
    def before_first_token(self, request: Request) -> str | None:
        if request.id == "bad":
            raise RuntimeError("planned to fail")
        return "refused by a hook" if request.id == "hooked" else None


def test_an_exception_in_committing_fails_the_requests_and_a_doubtful_state_drains() -> None:
    harness = Harness(faults=BrokenFirstToken())
    harness.submit("hooked", [1, 2], max_tokens=5)
    harness.run()
    assert harness.ends["hooked", 0].message == "refused by a hook"
    harness.submit("bad", [1, 2], max_tokens=5)
    harness.submit("beside", [3, 4], max_tokens=5)
    harness.run()
    for id in ("bad", "beside"):
        assert harness.ends[id, 0].reason == "error" and "planned to fail" in harness.ends[id, 0].message
    assert harness.engine.broken and harness.engine.draining
    assert refused(harness.try_submit("more", [1])).status == 503
    assert "draining" in harness.engine.status().detail


def test_a_runner_that_fails_ends_the_engine_with_a_fault() -> None:
    harness = Harness()
    harness.submit("a", [1, 2], max_tokens=5)
    harness.step()

    def broken(plan: Any) -> None:
        raise RuntimeError("device lost")

    harness.runner.launch = broken
    with pytest.raises(EngineFault, match="launch: RuntimeError: device lost"):
        harness.step()


# progress


class Withheld(Faults):
    """No block for anybody while `on`."""

    on = True

    def before_allocate(self, request: Request, num_tokens: int) -> bool:
        return not self.on


def test_a_stall_is_measured_said_and_ends_when_its_cause_does() -> None:
    faults = Withheld()
    harness = Harness(faults=faults)
    harness.clock.advance(10**12)
    harness.submit("a", [1, 2], max_tokens=3)
    harness.step()
    assert not harness.engine.progressed
    harness.clock.advance(5 * 10**9)
    harness.step()
    status = harness.engine.status()
    assert status.busy and 5 * 10**9 <= status.stalled_ns < 6 * 10**9
    assert "1 waiting" in status.detail
    faults.on = False
    harness.step()
    assert harness.engine.status().stalled_ns == 0
    harness.run()
    assert harness.ends["a", 0].reason == "length"
    assert harness.engine.status().stalled_ns == 0


def test_requests_whose_readers_are_slow_are_no_stall() -> None:
    harness = Harness()
    harness.submit("a", [1, 2], max_tokens=5)
    harness.step()
    harness.engine.pause("a")
    harness.engine.pause("unknown")
    for _ in range(5):
        assert harness.step() == []
        harness.clock.advance(10**10)
    assert harness.engine.status().stalled_ns == 0
    harness.engine.resume("a")
    harness.engine.resume("a")
    assert harness.engine.status().stalled_ns < 2 * 10**10
    harness.run()
    assert harness.ends["a", 0].reason == "length"
    harness.assert_clean()


def test_status_counts_steps_and_gauges() -> None:
    harness = Harness(max_rows=1)
    harness.submit("a", [1] * 8, max_tokens=4)
    harness.submit("b", [2] * 8, max_tokens=4)
    harness.step()
    status = harness.engine.status()
    assert (status.steps, status.running, status.waiting, status.busy) == (1, 1, 1, True)
    assert status.waiting_by_reason == {"wait_slot": 1}
    assert status.blocks_active + status.blocks_free == status.blocks_total == 64
    harness.run()
    assert harness.engine.status().counters["generation_tokens"] == 8


# invariants


def test_the_books_are_checked_once_in_each_idle_period(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    checks: list[int] = []
    monkeypatch.setattr(harness.engine, "check", lambda: bool(checks.append(1)) or True)
    harness.engine.when_idle()
    harness.engine.when_idle()
    assert len(checks) == 1
    harness.submit("a", [1, 2], max_tokens=2)
    harness.engine.when_idle()
    assert len(checks) == 1
    harness.run()
    checks.clear()
    harness.engine.when_idle()
    harness.engine.when_idle()
    assert len(checks) == 1


def test_a_broken_invariant_is_logged_with_a_dump_and_drains(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    harness.submit("a", [1, 2], max_tokens=5)
    harness.step()
    harness.engine.options = type(harness.engine.options)(config={"a": 1})
    harness.scheduler._live.rows.decodes.clear()
    assert harness.engine.ask(Ask("q", "check")).value["ok"] is False
    assert harness.engine.draining and harness.engine.broken
    assert "broken invariant" in caplog.text and "a#0" in caplog.text and '"counters"' in caplog.text


# questions and controls


def test_questions_are_answered() -> None:
    harness = Harness()
    harness.submit("a", [1, 2], max_tokens=2)
    stats = harness.engine.ask(Ask("q", "stats"))
    assert stats.id == "q" and stats.value["waiting"] == 1
    assert harness.engine.ask(Ask("q", "config")).value == {"a": 1}
    assert harness.engine.ask(Ask("q", "memory")).value["device_bytes"]["total"] == 0
    assert harness.engine.ask(Ask("q", "check")).value == {"ok": True, "broken": ""}
    assert "no such question" in harness.engine.ask(Ask("q", "nonsense")).value["error"]


def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    harness = Harness()
    harness.submit("a", [1, 2], max_tokens=5)
    assert harness.engine.control(Control("drain")) == []
    answer = refused(harness.try_submit("b", [1, 2]))
    assert answer.status == 503 and answer.retry_after_s is not None
    harness.run()
    assert harness.ends["a", 0].reason == "length"


def test_halt_ends_everything_at_once() -> None:
    harness = Harness(overlap=True)
    harness.submit("a", [1, 2], max_tokens=50, n=2)
    harness.step()
    harness.hear(harness.engine.control(Control("halt")))
    assert harness.engine.halted
    assert [harness.ends["a", i].reason for i in range(2)] == ["abort", "abort"]


def test_dropping_the_cache_forgets_what_was_hit_before() -> None:
    harness = Harness()
    tokens = list(range(16))
    for id in ("a", "b"):
        harness.submit(id, tokens, max_tokens=2)
        harness.run()
    assert harness.ends["b", 0].usage.cached_tokens == 12
    harness.engine.control(Control("drop_cache"))
    harness.engine.control(Control("nonsense"))
    harness.submit("c", tokens, max_tokens=2)
    harness.run()
    assert harness.ends["c", 0].usage.cached_tokens == 0
    harness.assert_clean()


# ends of text, logprobs


def scripted(caps: RunnerCaps, clock: VirtualClock) -> ScriptedRunner:
    return ScriptedRunner(caps, Script(eos_token_id=2, default=(10, 11, 12)), clock=clock)


def test_end_of_text_and_stop_ids_end_a_choice_unless_ignored() -> None:
    harness = Harness(make_runner=scripted, eos=frozenset({2}))
    harness.submit("eos", [5], max_tokens=20)
    harness.submit("id", [5], max_tokens=20, stop_token_ids=(11,))
    harness.submit("ignore", [5], max_tokens=6, ignore_eos=True)
    harness.submit("both", [5], max_tokens=20, ignore_eos=True, stop_token_ids=(12,))
    harness.run()
    assert harness.ids["eos", 0] == [10, 11, 12, 2]
    assert (harness.ends["eos", 0].reason, harness.ends["eos", 0].stop_token) == ("stop", 2)
    assert harness.ids["id", 0] == [10, 11]
    assert harness.ends["id", 0].stop_token == 11
    assert harness.ids["ignore", 0] == [10, 11, 12, 2, 2, 2]
    assert harness.ends["ignore", 0].reason == "length"
    assert harness.ids["both", 0] == [10, 11, 12]


def test_logprobs_come_beside_their_tokens_and_of_the_prompt_with_the_end() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3, 4], max_tokens=2, logprobs=2, prompt_logprobs=0)
    harness.submit("b", [1, 2, 3, 4], max_tokens=2)
    messages = harness.step()
    items = {item.id: item for item in messages[0].items}  # type: ignore[union-attr]
    assert len(items["a"].logprobs or []) == 1 and len((items["a"].logprobs or [])[0].top) == 2
    assert items["b"].logprobs is None
    harness.run()
    assert len(harness.ends["a", 0].prompt_logprobs or []) == 3
    assert harness.ends["b", 0].prompt_logprobs is None


def test_ready_says_what_the_engine_runs_with() -> None:
    ready = Harness().engine.ready()
    assert (ready.model, ready.block_size, ready.num_blocks, ready.max_num_seqs) == ("shadow", 4, [64], 8)
    assert (ready.vocab_size, ready.max_model_len, ready.max_num_batched_tokens) == (1000, 200, 32)


@pytest.mark.parametrize(("num_blocks", "window", "most"), [(64, None, 200), (10, None, 41), (10, 8, 200), (2, 8, 9)])
def test_ready_says_the_most_that_a_request_gets_and_a_token_more_is_refused(
    num_blocks: int, window: int | None, most: int
) -> None:
    harness = Harness(num_blocks=(num_blocks,), groups=(KvGroup(1, window),))
    assert harness.engine.ready().max_request_tokens == most
    assert harness.submit("fits", [1] * 5, max_tokens=most - 5).max_tokens == most - 5
    assert refused(harness.try_submit("more", [1] * 5, max_tokens=most - 4)).code == "context_length_exceeded"
    harness.run()
    harness.assert_clean()


def test_finished_messages_are_of_the_wire() -> None:
    harness = Harness()
    harness.submit("a", [1], max_tokens=1)
    assert isinstance(harness.step()[-1], Finished)
