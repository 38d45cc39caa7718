"""Faults that users of other engines have reported, as small cases on scheduler and cache; named after their ids.

The rig is that of the collection: block size 16, eight rows, budget 256, pool size in blocks.
"""

from __future__ import annotations

import random

import pytest

from steelyard.core.request import FinishReason, Request
from steelyard.core.timed import State
from steelyard.errors import ContextLengthExceeded
from steelyard.scheduler.protocols import Faults
from steelyard.sim.simulation import Simulation
from tests.scheduler.scheduler_rig import (
    POLICIES,
    Rig,
    assert_idle,
    assert_same_as_solo,
    make_choices,
    make_request,
    run_checked,
)


@pytest.fixture(params=POLICIES, autouse=True)
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every case holds whoever goes first."""
    monkeypatch.setattr(Rig, "policy", request.param)
    return str(request.param)


BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])


def run(rig: Rig, requests: list[Request], **injected: object) -> Simulation:
    simulation = rig.simulation(**injected)
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert_idle(simulation, requests)
    assert_same_as_solo(simulation, requests, rig)
    return simulation


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def test_s01_a_prompt_larger_than_the_pool_is_refused_with_the_numbers_and_the_next_is_served() -> None:
    rig = Rig(num_blocks=49)
    simulation = rig.simulation()
    too_long = make_request("long", prompt(1002), 10)
    with pytest.raises(ContextLengthExceeded, match=r"1002.*1012.*784"):
        simulation.add(too_long)
    assert too_long.state is State.ENDED
    with pytest.raises(ContextLengthExceeded, match=r"700.*1200.*784"):
        simulation.add(make_request("long output", prompt(700), 500))
    clamped = make_request("clamped", prompt(700), None)
    simulation.add(clamped)
    assert clamped.max_tokens == 85
    short = make_request("short", prompt(10), 5)
    simulation.add(short)
    run_checked(simulation)
    assert clamped.reason is FinishReason.LENGTH and len(simulation.outputs[clamped.key]) == 85
    assert len(simulation.outputs[short.key]) == 5


def test_s03_refused_allocation_stops_progress_without_a_crash_and_service_resumes() -> None:
    class Refuse(Faults):
        active = True

        def before_allocate(self, request: Request, num_tokens: int) -> bool:
            return not self.active

    faults = Refuse()
    simulation = Rig().simulation(faults=faults)
    request = make_request("a", prompt(20), 40)
    simulation.add(request)
    for _ in range(5):
        assert not simulation.step()
        simulation.scheduler.check()
    assert simulation.scheduler.waiting_by_reason() == {"wait_kv": 1}
    faults.active = False
    for _ in range(3):
        simulation.step()
    faults.active = True
    while simulation.step():
        simulation.scheduler.check()
    assert simulation.scheduler.num_running == 1, "it holds its blocks and waits for more"
    faults.active = False
    run_checked(simulation)
    assert_same_as_solo(simulation, [request], Rig())


@BOTH
def test_s05_priority_preemption_leaves_rows_of_this_step_alone(overlap: bool, policy: str) -> None:
    rig = Rig(num_blocks=24, overlap=overlap, caching=False)
    simulation = rig.simulation()
    normal = [make_request(f"n{i}", prompt(64, i), 64, priority=1) for i in range(15)]
    for request in normal:
        simulation.add(request)
    for _ in range(20):
        simulation.step()
    running = {r.key for r in normal if r.row >= 0 or r.reason}
    high = [make_request(f"h{i}", prompt(64, 100 + i), 64, priority=0, now_ns=simulation.clock()) for i in range(5)]
    for request in high:
        simulation.add(request)
    run_checked(simulation)
    assert_same_as_solo(simulation, normal + high, rig)
    assert simulation.scheduler.counters.preemptions > 0
    queued = [r.key for r in simulation.ended if r.key not in running]
    assert (set(queued[:5]) == {r.key for r in high}) == (policy == "priority")


@BOTH
def test_s07_a_preempted_request_runs_again_before_later_arrivals(overlap: bool) -> None:
    rig = Rig(num_blocks=10, overlap=overlap, caching=False)
    simulation = rig.simulation()
    a, b, c, d = (make_request(name, prompt(60, i), 60) for i, name in enumerate("abcd"))
    for request in (a, b, c, d):
        simulation.add(request)
    entered: list[int] = []
    while simulation.scheduler.has_work:
        assert simulation.step()
        simulation.scheduler.check()
    entered = [enter.tokens[0] for plan in simulation.plans for enter in plan.enter]
    assert b.num_preemptions > 0
    last_of_b = max(i for i, first in enumerate(entered) if first == b.tokens[0])
    assert all(entered.index(r.tokens[0]) > last_of_b for r in (c, d))


@BOTH
def test_s09_aborts_at_any_moment_leave_an_empty_step_and_an_idle_engine(overlap: bool) -> None:
    rng = random.Random(9)
    simulation = Rig(num_blocks=40, overlap=overlap).simulation()
    for round_number in range(3):
        live = [make_request(f"{round_number}.{i}", prompt(rng.randrange(1, 100), i), 50) for i in range(20)]
        for request in live:
            simulation.add(request)
        rng.shuffle(live)
        for request in live:
            for _ in range(rng.randrange(3)):
                simulation.step()
            simulation.take(simulation.scheduler.stop(request.key, FinishReason.ABORT, simulation.clock()))
            simulation.scheduler.check()
        run_checked(simulation)
        assert_idle(simulation, live)
    assert simulation.scheduler.counters.finished_abort == 60


@BOTH
def test_s11_a_short_shortage_of_blocks_queues_or_preempts_and_all_finish(overlap: bool) -> None:
    requests = [make_request(str(i), prompt(40, i), 60) for i in range(8)]
    simulation = run(Rig(num_blocks=12, overlap=overlap), requests)
    assert simulation.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("length", [31, 32, 33, 100])
def test_s13_chunked_prefill_without_prefix_caching(length: int) -> None:
    simulation = run(Rig(budget=32, caching=False), [make_request("a", prompt(length), 5)])
    assert simulation.scheduler.counters.prefill_chunks == -(-length // 32)


@BOTH
def test_s15_short_prompts_do_not_wait_for_the_end_of_a_long_one(overlap: bool) -> None:
    simulation = Rig(budget=64, num_blocks=200, overlap=overlap).simulation()
    long = make_request("long", prompt(1500), 5)
    simulation.add(long)
    for _ in range(3):
        simulation.step()
    shorts = [make_request(str(i), prompt(20, i + 1), 5, now_ns=simulation.clock()) for i in range(5)]
    for request in shorts:
        simulation.add(request)
    while not all(simulation.outputs[r.key] for r in shorts):
        assert simulation.step()
        assert not simulation.outputs[long.key]
    assert long.num_computed < 1500 // 2, "the shorts came first by far"
    run_checked(simulation)


@BOTH
def test_s23_three_choices_with_a_pool_for_one_are_each_same_as_solo(overlap: bool) -> None:
    simulation = run(Rig(num_blocks=16, overlap=overlap), make_choices("n3", prompt(40), 100, 3))
    counters = simulation.scheduler.counters
    assert counters.forks == 2 and counters.preemptions > 0


@BOTH
def test_s27_window_layers_hold_a_window_of_blocks_and_admit_a_prompt_larger_than_the_pool(overlap: bool) -> None:
    rig = Rig(num_blocks=20, windows=(64,), overlap=overlap)
    simulation = rig.simulation()
    request = make_request("a", prompt(1000), 50)
    simulation.add(request)
    peak_decoding = 0
    while simulation.scheduler.has_work:
        assert simulation.step()
        simulation.scheduler.check()
        if request.num_generated:
            peak_decoding = max(peak_decoding, simulation.scheduler.cache.usage().active)
    assert 0 < peak_decoding <= 64 // 16 + 2
    assert_same_as_solo(simulation, [request], rig)


@pytest.mark.parametrize("caching", [False, True], ids=["no-cache", "cache"])
@BOTH
def test_s29_many_requests_of_random_lengths_in_a_small_pool(overlap: bool, caching: bool) -> None:
    rng = random.Random(29)
    rig = Rig(num_blocks=40, overlap=overlap, caching=caching, max_num_seqs=32)
    requests = [make_request(str(i), prompt(rng.randrange(1, 200), i % 3), rng.randrange(1, 60)) for i in range(50)]
    simulation = run(rig, requests)
    assert simulation.scheduler.counters.preemptions > 0
    assert (simulation.scheduler.counters.prefix_hits_tokens > 0) == caching


@pytest.mark.parametrize("length", [16, 32, 48])
@BOTH
def test_k01_a_fully_cached_prompt_recomputes_at_least_its_last_token(overlap: bool, length: int) -> None:
    rig = Rig(overlap=overlap)
    simulation = rig.simulation()
    ids = prompt(length)
    requests = [make_request(name, ids, 6) for name in ("first", "second", "third", "fourth")]
    for group in (requests[:1], requests[1:2], requests[2:]):
        for request in group:
            simulation.add(request)
        run_checked(simulation)
    assert_same_as_solo(simulation, requests, rig)
    assert [r.cached_tokens for r in requests] == [0] + [length - 16] * 3
    assert all(work.num_new >= 1 for plan in simulation.plans for work in plan.work)


@BOTH
def test_k03_two_identical_prompts_in_one_step_share_nothing_that_is_not_computed(overlap: bool) -> None:
    apart = run(Rig(budget=128, overlap=overlap, caching=False), [make_request(n, prompt(64), 8) for n in "ab"])
    assert len(apart.plans[0].work) == 2
    simulation = run(Rig(budget=128, overlap=overlap), [make_request(name, prompt(64), 8) for name in "ab"])
    assert len(simulation.plans[0].work) == 1 and simulation.scheduler.counters.prefix_hits_tokens == 48
    run(Rig(budget=32, overlap=overlap), [make_request(name, prompt(64), 8) for name in "ab"])


@BOTH
def test_k05_free_never_exceeds_the_total(overlap: bool) -> None:
    simulation = Rig(num_blocks=12, overlap=overlap).simulation()
    requests = make_choices("n", prompt(33), 40, 3) + [make_request("same", prompt(33), 40)]
    for request in requests:
        simulation.add(request)
    while simulation.scheduler.has_work:
        simulation.step()
        usage = simulation.scheduler.cache.usage()
        assert 0 <= usage.free <= usage.total
        if simulation.scheduler.counters.steps == 20:
            for request in requests:
                for _ in range(2):
                    simulation.scheduler.stop(request.key, FinishReason.ABORT, simulation.clock())
    assert_idle(simulation, requests)


@BOTH
def test_k07_recompute_after_preemption_is_not_a_prefix_hit(overlap: bool) -> None:
    requests = [make_request(str(i), prompt(60, i), 40) for i in range(30)]
    simulation = run(Rig(num_blocks=24, overlap=overlap), requests)
    counters = simulation.scheduler.counters
    assert counters.preemptions > 0 and counters.recomputed_tokens > 0
    assert counters.prefix_hits_tokens == 0
    assert all(request.cached_tokens == 0 for request in requests)
    assert counters.recomputed_tokens == sum(request.num_recomputed for request in requests)


def test_k09_prompt_logprobs_of_a_cached_prompt_are_complete() -> None:
    simulation = Rig(budget=16).simulation()
    requests = [make_request(name, prompt(40), 3, sampling={"prompt_logprobs": 1}) for name in "ab"]
    plain = make_request("c", prompt(40), 3)
    for request in (*requests, plain):
        simulation.add(request)
        run_checked(simulation)
    assert len(requests[0].prompt_logprobs) == 39
    assert requests[0].prompt_logprobs == requests[1].prompt_logprobs
    assert requests[1].cached_tokens == 0 and plain.cached_tokens == 32


def test_k11_prompt_logprobs_reach_only_those_who_asked() -> None:
    requests = [
        make_request(str(i), prompt(20 + i, i), 4, sampling={"prompt_logprobs": 0} if i % 2 else {}) for i in range(8)
    ]
    run(Rig(budget=50), requests)
    assert [len(r.prompt_logprobs) for r in requests] == [19 + i if i % 2 else 0 for i in range(8)]
    alone = make_request("alone", prompt(23, 3), 4, sampling={"prompt_logprobs": 0})
    run(Rig(), [alone])
    assert requests[3].prompt_logprobs == alone.prompt_logprobs


def test_k13_a_tenant_never_hits_what_another_has_cached() -> None:
    rig = Rig()
    simulation = rig.simulation()
    requests = [make_request(f"{i}", prompt(512), 4, tenant=t) for i, t in enumerate((1, 2, 1, 2))]
    for request in requests:
        simulation.add(request)
        run_checked(simulation)
    assert [r.cached_tokens for r in requests] == [0, 0, 496, 496]
    assert_same_as_solo(simulation, requests, rig)


def test_k21_output_is_never_cut_short_under_load() -> None:
    requests = [make_request(str(i), prompt(10, i), 50) for i in range(64)]
    simulation = run(Rig(num_blocks=30, overlap=True), requests)
    assert all(len(simulation.outputs[r.key]) == 50 and r.reason is FinishReason.LENGTH for r in requests)


def test_k23_one_prompt_four_times_gives_one_answer_and_hits_from_the_second() -> None:
    rig = Rig()
    simulation = rig.simulation()
    requests = [make_request(str(i), prompt(70), 20) for i in range(4)]
    for request in requests:
        simulation.add(request)
        run_checked(simulation)
    assert len({tuple(simulation.outputs[r.key]) for r in requests}) == 1
    assert [r.cached_tokens for r in requests] == [0, 64, 64, 64]


def test_m01_every_accepted_request_is_counted_once_by_how_it_ended() -> None:
    simulation = Rig().simulation()
    requests = [make_request(str(i), prompt(10, i), 20) for i in range(10)]
    for request in requests:
        simulation.add(request)
    for _ in range(4):
        simulation.step()
    for request in requests[::2]:
        simulation.take(simulation.scheduler.stop(request.key, FinishReason.ABORT, simulation.clock()))
    run_checked(simulation)
    counters = simulation.scheduler.counters
    assert (counters.finished_abort, counters.finished_length) == (5, 5)
