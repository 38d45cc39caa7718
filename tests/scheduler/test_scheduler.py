"""The scheduler's own rules, each shown on a handful of requests over the shadow runner."""

from __future__ import annotations

import pytest

from steelyard.core.request import FinishReason, Request
from steelyard.core.step import RowWork, StepPlan, Want
from steelyard.core.timed import State
from steelyard.errors import ContextLengthExceeded, InvalidRequest
from steelyard.scheduler.policies.fcfs import Fcfs
from steelyard.scheduler.protocols import Faults
from tests.scheduler.scheduler_rig import Rig, assert_idle, assert_same_as_solo, make_choices, make_request, run_checked

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
PROMPT = list(range(100, 140))


def first_token(ids: list[int], index: int = 0) -> int:
    """What the shadow model says after `ids`."""
    simulation = Rig().simulation()
    request = make_request("probe", ids, index + 1)
    simulation.add(request)
    simulation.run()
    return simulation.outputs[request.key][index]


# admission


def test_add_refuses_an_empty_prompt_a_key_in_use_and_what_exceeds_the_context() -> None:
    simulation = Rig(max_model_len=64).simulation()
    simulation.add(make_request("a", PROMPT, 10))
    for request, error in (
        (make_request("b", [], 1), "at least 1 token"),
        (make_request("a", PROMPT, 10), "being served already"),
        (make_request("c", PROMPT, 25), r"40 tokens.*needs 65.*64 tokens"),
        (make_request("d", PROMPT + PROMPT, None), r"80 tokens.*at least 1 of output"),
    ):
        with pytest.raises(InvalidRequest, match=error):
            simulation.add(request)
        assert request.state is State.ENDED
    assert simulation.scheduler.num_waiting == 1


@pytest.mark.parametrize(("num_blocks", "most"), [(64, 24), (3, 9)])
def test_an_unset_max_tokens_is_clamped_to_context_and_pool_and_ends_with_length(num_blocks: int, most: int) -> None:
    rig = Rig(max_model_len=64, num_blocks=num_blocks)
    simulation = rig.simulation()
    request = make_request("a", PROMPT, None)
    simulation.add(request)
    assert request.max_tokens == most
    run_checked(simulation)
    assert len(simulation.outputs[request.key]) == most and request.reason is FinishReason.LENGTH
    with pytest.raises(ContextLengthExceeded):
        simulation.add(make_request("b", PROMPT, most + 1))
    simulation.add(make_request("c", PROMPT, most))


def test_a_request_waits_for_room_for_all_that_is_known_of_it() -> None:
    simulation = Rig(num_blocks=8).simulation()
    first, second = make_request("a", list(range(70)), 5), make_request("b", list(range(200, 270)), 5)
    simulation.add(first)
    simulation.add(second)
    simulation.step()
    assert simulation.scheduler.num_running == 1
    assert second.state is State.WAIT_KV and simulation.scheduler.waiting_by_reason() == {"wait_kv": 1}
    run_checked(simulation)
    assert simulation.scheduler.counters.preemptions == 0


def test_a_request_that_did_not_fit_is_looked_up_again_only_when_blocks_were_freed() -> None:
    simulation = Rig(num_blocks=8).simulation()
    cache = simulation.scheduler.cache
    num_lookups = 0
    match = cache.match

    def counting(request: Request) -> int:
        nonlocal num_lookups
        num_lookups += request.id == "b"
        return match(request)

    cache.match = counting  # type: ignore[method-assign]
    first, second = make_request("a", list(range(70)), 20), make_request("b", list(range(200, 270)), 5)
    simulation.add(first)
    simulation.add(second)
    run_checked(simulation)
    assert len(simulation.plans) > 20 and num_lookups == 2
    assert second.reason is FinishReason.LENGTH


def test_each_waiting_request_is_in_the_state_that_says_why() -> None:
    simulation = Rig(max_num_seqs=2, budget=8).simulation()
    requests = [make_request(str(i), [i + 1] * 8, 6) for i in range(4)]
    for request in requests:
        simulation.add(request)
    assert all(r.state is State.WAIT_STEP_BOUNDARY for r in requests)
    simulation.step()
    assert [r.state for r in requests] == [State.PREFILL] + [State.WAIT_BUDGET] * 3
    simulation.step()
    assert requests[1].state is State.PREFILL
    simulation.step()
    assert [r.state for r in requests[2:]] == [State.WAIT_SLOT] * 2
    late = make_request("late", [9], 1, now_ns=simulation.clock())
    simulation.add(late)
    simulation.step()
    assert late.state is State.WAIT_SLOT
    run_checked(simulation)
    assert {State.WAIT_BUDGET, State.WAIT_SLOT} <= requests[3].buckets_ns.keys()


# ends


@BOTH
def test_an_end_of_text_token_is_kept_and_named_and_costs_at_most_one_overshoot_row(overlap: bool) -> None:
    simulation = Rig(overlap=overlap).simulation()
    eos = first_token(PROMPT, 3)
    request = make_request("a", PROMPT, 50, stop_ids=frozenset({eos}))
    simulation.add(request)
    run_checked(simulation)
    assert_idle(simulation, [request])
    assert request.reason is FinishReason.STOP and request.stop_token == eos
    assert simulation.outputs[request.key] == request.tokens[40:] and request.tokens[-1] == eos
    assert len(request.tokens) == 44
    expected = 1 if overlap else 0
    assert simulation.scheduler.counters.overshoot_tokens == request.num_overshoot == expected
    assert (State.OVERSHOOT in request.buckets_ns) == overlap


@BOTH
def test_a_request_known_to_reach_its_length_is_not_scheduled_again(overlap: bool) -> None:
    simulation = Rig(overlap=overlap).simulation()
    requests = [make_request(str(i), PROMPT, i + 1) for i in range(5)]
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert simulation.scheduler.counters.overshoot_tokens == 0
    sampled = sum(Want.TOKEN in work.want for plan in simulation.plans for work in plan.work)
    assert sampled == sum(r.max_tokens for r in requests)
    assert all(r.reason is FinishReason.LENGTH for r in requests)


def test_overlap_schedules_the_next_step_before_the_last_is_committed_and_two_at_most() -> None:
    simulation = Rig(overlap=True).simulation()
    request = make_request("a", PROMPT, 10)
    simulation.add(request)
    assert simulation.launch() is not None
    plan = simulation.launch()
    assert plan is not None and plan.work == (RowWork(0, 40, 1, Want.TOKEN),)
    assert len(request.tokens) == 40 and simulation.scheduler.in_flight == 2
    assert simulation.launch() is None
    run_checked(simulation)


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 2), (4, 5)])
def test_p11_stop_ids_count_only_after_min_tokens_others(min_tokens: int, length: int) -> None:
    simulation = Rig().simulation()
    ids = {first_token(PROMPT, i) for i in range(8)}
    request = make_request("a", PROMPT, 20, stop_ids=frozenset(ids), sampling={"min_tokens": min_tokens})
    simulation.add(request)
    run_checked(simulation)
    assert len(simulation.outputs[request.key]) == length and request.reason is FinishReason.STOP


@BOTH
@pytest.mark.parametrize("num_steps", range(9))
@pytest.mark.parametrize("keep", [-1, 0, 1])
def test_stop_ends_a_request_in_every_state_and_twice_is_once(overlap: bool, num_steps: int, keep: int) -> None:
    rig = Rig(overlap=overlap, budget=16, num_blocks=4)
    simulation = rig.simulation()
    requests = [make_request("a", PROMPT, 20), *make_choices("b", PROMPT[:9], 20, 2)]
    for request in requests:
        simulation.add(request)
    for _ in range(num_steps):
        (simulation.launch if num_steps % 2 else simulation.step)()
    reason = FinishReason.ABORT if keep < 0 else FinishReason.STOP
    for request in requests:
        num_before = request.num_generated
        events = simulation.scheduler.stop(request.key, reason, simulation.clock(), keep)
        assert [e.request for e in events] == [request] and request.reason is reason
        assert simulation.scheduler.stop(request.key, reason, simulation.clock(), keep) == []
        if keep >= 0:
            assert request.num_generated == min(keep, num_before)
        simulation.scheduler.check()
    emitted = {key: list(ids) for key, ids in simulation.outputs.items()}
    run_checked(simulation)
    assert_idle(simulation, requests)
    assert simulation.outputs == emitted, "nothing is emitted after the end"
    assert simulation.scheduler.stop(("nobody", 0), reason, 0) == []


@BOTH
def test_a_failed_row_ends_with_error_and_the_others_go_on(overlap: bool) -> None:
    def fail(plan: StepPlan, work: RowWork) -> str | None:
        return "logits are not finite" if work.row == 1 and work.start == 43 else None

    rig = Rig(overlap=overlap)
    simulation = rig.simulation(fail=fail)
    requests = [make_request(name, [ord(name)] * 40, 10) for name in "abc"]
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert_idle(simulation, requests)
    a, b, c = requests
    assert b.reason is FinishReason.ERROR and b.detail == "logits are not finite" and b.num_generated == 4
    assert_same_as_solo(simulation, [a, c], rig)


def test_a_row_the_runner_says_nothing_of_ends_with_error() -> None:
    simulation = Rig().simulation()
    request = make_request("a", PROMPT, 10)
    simulation.add(request)
    plan = simulation.scheduler.schedule(1)
    assert plan is not None
    result = simulation.runner.collect(simulation.runner.launch(plan))
    silent = type(result)(result.id, (), result.timing)
    simulation.take(simulation.scheduler.commit(silent, 2))
    assert request.reason is FinishReason.ERROR and "no result" in request.detail
    simulation.scheduler.check()


def test_d11_a_fault_before_the_first_token_ends_the_request_with_its_message() -> None:
    class Fail(Faults):
        def before_first_token(self, request: Request) -> str | None:
            return "injected"

    simulation = Rig().simulation(faults=Fail())
    request = make_request("a", PROMPT, 10)
    simulation.add(request)
    run_checked(simulation)
    assert request.reason is FinishReason.ERROR and request.detail == "injected"
    assert simulation.outputs[request.key] == []


# pause


@BOTH
def test_a_paused_request_computes_nothing_keeps_its_blocks_and_goes_on(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    simulation = rig.simulation()
    slow, quick = make_request("slow", PROMPT, 30), make_request("quick", [7] * 20, 30)
    simulation.add(slow)
    simulation.add(quick)
    for _ in range(5):
        simulation.step()
    simulation.scheduler.pause("slow", simulation.clock())
    for _ in range(3):
        simulation.step()
    length = len(slow.tokens)
    while simulation.scheduler.get(quick.key) is not None:
        simulation.step()
        simulation.scheduler.check()
    assert len(slow.tokens) == length and slow.state is State.RESIDENT_UNSCHEDULED and slow.row >= 0
    assert not simulation.step()
    simulation.scheduler.resume("slow", simulation.clock())
    run_checked(simulation)
    assert_same_as_solo(simulation, [slow, quick], rig)


def test_paused_requests_give_way_when_they_alone_hold_what_the_queue_lacks() -> None:
    rig = Rig(num_blocks=4)
    simulation = rig.simulation()
    slow, quick = make_request("slow", PROMPT, 10), make_request("quick", [7] * 30, 10)
    simulation.add(slow)
    simulation.step()
    simulation.scheduler.pause("slow", simulation.clock())
    simulation.add(quick)
    while simulation.scheduler.get(quick.key) is not None:
        assert simulation.step()
        simulation.scheduler.check()
    assert slow.state is State.PREEMPTED
    simulation.scheduler.resume("slow", simulation.clock())
    run_checked(simulation)
    assert_same_as_solo(simulation, [slow, quick], rig)


# preemption and forks


@BOTH
def test_the_anchor_is_never_preempted_and_pressure_drains_the_pipeline_first(overlap: bool) -> None:
    rig = Rig(num_blocks=9, overlap=overlap, caching=False)
    simulation = rig.simulation()
    requests = [make_request(str(i), [i + 1] * 30, 60) for i in range(4)]
    for request in requests:
        simulation.add(request)
    while simulation.scheduler.has_work:
        before = [r.num_preemptions for r in requests]
        in_flight = simulation.scheduler.in_flight
        simulation.launch()
        if before != [r.num_preemptions for r in requests]:
            assert in_flight == 0
        simulation.scheduler.check()
        if simulation.scheduler.in_flight == (2 if overlap else 1) or simulation.scheduler.in_flight == in_flight:
            simulation.commit()
    assert requests[0].num_preemptions == 0 and sum(r.num_preemptions for r in requests) > 0
    assert [r.key for r in simulation.ended] == [r.key for r in requests]
    assert_same_as_solo(simulation, requests, rig)


@BOTH
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 48])
@pytest.mark.parametrize("caching", [False, True])
def test_choices_share_the_prompt_and_each_computes_its_last_token(overlap: bool, length: int, caching: bool) -> None:
    rig = Rig(overlap=overlap, caching=caching)
    simulation = rig.simulation()
    choices = make_choices("n", list(range(length)), 10, 4)
    for request in choices:
        simulation.add(request)
    run_checked(simulation)
    assert_idle(simulation, choices)
    assert_same_as_solo(simulation, choices, rig)
    counters = simulation.scheduler.counters
    assert counters.forks == (3 if length > 1 else 0)
    num_copies = sum(len(plan.copies) for plan in simulation.plans)
    assert num_copies == (3 if (length - 1) % 16 else 0)
    if length > 1:
        children = [enter for plan in simulation.plans[1:] for enter in plan.enter]
        assert [enter.start for enter in children] == [length - 1] * 3
        assert counters.prompt_tokens == length


def test_a_choice_whose_sibling_has_gone_is_an_ordinary_request() -> None:
    rig = Rig(max_num_seqs=1)
    simulation = rig.simulation()
    choices = make_choices("n", PROMPT, 5, 3)
    for request in choices:
        simulation.add(request)
    run_checked(simulation)
    assert simulation.scheduler.counters.forks == 0
    assert_same_as_solo(simulation, choices, rig)


@BOTH
def test_preempted_and_hit_again_recomputes_and_counts_only_what_was_lost(overlap: bool) -> None:
    rig = Rig(num_blocks=8, overlap=overlap)
    simulation = rig.simulation()
    requests = [make_request(str(i), [i + 1] * 32, 60) for i in range(2)]
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert_same_as_solo(simulation, requests, rig)
    second = requests[1]
    computed = [w for plan in simulation.plans for w in plan.work]
    total = sum(w.num_new for w in computed)
    needed = sum(len(r.tokens) - 1 for r in requests)
    assert second.num_preemptions > 0 and second.num_recomputed > 0
    assert total == needed + simulation.scheduler.counters.recomputed_tokens
    assert second.cached_tokens == 0


def test_a_step_never_exceeds_its_budget_and_half_of_it_reaches_shorter_prompts() -> None:
    simulation = Rig(budget=10, num_blocks=200).simulation()
    long, short = make_request("long", [1] * 200, 2), make_request("short", [2] * 7, 2)
    for request in (long, short):
        simulation.add(request)
    plan = simulation.launch()
    assert plan is not None and [w.num_new for w in plan.work] == [5, 5]
    simulation.commit()
    plan = simulation.launch()
    assert plan is not None and [w.num_new for w in plan.work] == [8, 2], "what the short one does not need goes back"
    simulation.commit()
    run_checked(simulation)
    assert all(plan.num_tokens <= 10 for plan in simulation.plans)


def test_an_idle_scheduler_plans_nothing() -> None:
    simulation = Rig().simulation()
    assert simulation.scheduler.schedule(5) is None and not simulation.scheduler.has_work
    simulation.scheduler.check()


@BOTH
def test_victims_are_never_the_anchor_nor_rows_of_this_step_whatever_the_order_prefers(overlap: bool) -> None:
    class OldestFirst(Fcfs):
        def victim_key(self, request: Request, now_ns: int) -> tuple[float, ...]:
            return (-request.order_key[-1],)

    rig = Rig(num_blocks=12, budget=20, overlap=overlap, caching=False)
    simulation = rig.simulation(order=OldestFirst())
    requests = [make_request("long", [1] * 120, 20)]
    requests += [make_request(str(i), [i + 2] * 14, 25) for i in range(3)]
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert_same_as_solo(simulation, requests, rig)
    assert requests[0].num_preemptions == 0 and simulation.scheduler.counters.preemptions > 0


@BOTH
def test_a_block_filled_by_the_last_step_of_a_request_is_cached_for_the_next_turn(overlap: bool) -> None:
    simulation = Rig(overlap=overlap).simulation()
    first = make_request("a", PROMPT[:20], 13)
    simulation.add(first)
    run_checked(simulation)
    assert len(first.tokens) == 33
    follow_up = make_request("b", [*first.tokens, 5], 2)
    simulation.add(follow_up)
    run_checked(simulation)
    assert follow_up.cached_tokens == 32
