"""Nobody waits for long prompts longer than they must: short prompts pass them, decodes go on, and nobody starves."""

from __future__ import annotations

import pytest

from steelyard.core.request import Request
from steelyard.core.timed import State
from tests.scheduler.load_rig import STEP_NS, TOKEN_NS, Arrival, Load, build, step_ns
from tests.scheduler.scheduler_rig import POLICIES, Rig, assert_same_as_solo, make_request, run_checked

RIG = Rig(num_blocks=2000, max_num_seqs=8, budget=256, max_model_len=4096)
ALL = pytest.mark.parametrize("policy", POLICIES)


def steps_to_first_token(policy: str, num_long: int) -> int:
    """Of a short prompt that comes when `num_long` prompts of 1,000 tokens have begun to be served."""
    simulation = build(RIG, policy)
    for i in range(num_long):
        simulation.add(make_request(f"long {i}", [i] * 1000, 10))
    for _ in range(6):
        simulation.step()
    short = make_request("short", [1] * 20, 10, now_ns=simulation.clock())
    simulation.add(short)
    before = len(simulation.plans)
    while not short.num_generated:
        assert simulation.step()
    return len(simulation.plans) - before


@ALL
def test_a_short_prompts_first_token_does_not_wait_longer_behind_more_long_ones(policy: str) -> None:
    steps = {num: steps_to_first_token(policy, num) for num in (5, 50, 200)}
    assert steps[5] == steps[50] == steps[200] <= 2


@ALL
def test_long_prompts_keep_half_of_the_budget_however_many_short_ones_come(policy: str) -> None:
    simulation = build(RIG, policy)
    long = make_request("long", [1] * 2000, 2)
    simulation.add(long)
    simulation.step()
    num_steps = 0
    while not long.num_generated:
        for _ in range(4):
            simulation.add(make_request(f"{num_steps} {_}", [2] * 50, 1, now_ns=simulation.clock()))
        assert simulation.step()
        num_steps += 1
    assert num_steps <= 2000 // (RIG.budget // 2) + 2


@ALL
def test_a_prompt_is_cut_only_where_others_wait(policy: str) -> None:
    simulation = build(RIG, policy)
    simulation.add(make_request("alone", [1] * 600, 2))
    sizes = []
    while simulation.scheduler.has_work:
        simulation.step()
        sizes.append(simulation.plans[-1].work[0].num_new)
    assert sizes == [256, 256, 88, 1]


def test_a_long_prompt_that_lacks_a_row_is_passed_by_a_few_short_ones_and_then_has_its_turn() -> None:
    simulation = build(Rig(num_blocks=2000, max_num_seqs=1, budget=256, max_model_len=4096), "fcfs")
    simulation.add(make_request("running", [1] * 30, 8))
    simulation.step()
    long = make_request("long", [2] * 500, 2, now_ns=simulation.clock())
    simulation.add(long)
    simulation.step()
    assert long.state is State.WAIT_SLOT
    shorts = [make_request(str(i), [3] * 20, 3, now_ns=simulation.clock()) for i in range(20)]
    for request in shorts:
        simulation.add(request)
    while long.row < 0:
        assert simulation.step()
    assert sum(r.row >= 0 or r.reason is not None for r in shorts) == simulation.scheduler.options.max_passes
    run_checked(simulation)


def test_a_preempted_request_is_passed_by_nobody() -> None:
    rig = Rig(num_blocks=24, budget=256, caching=False)
    simulation = rig.simulation()
    requests = [make_request(str(i), [i + 1] * 80, 100) for i in range(3)]
    for request in requests:
        simulation.add(request)
    while not any(r.state is State.PREEMPTED for r in requests):
        assert simulation.step()
    displaced = next(r for r in requests if r.state is State.PREEMPTED)
    late = make_request("late", [9] * 5, 2, now_ns=simulation.clock())
    simulation.add(late)
    while displaced.row < 0:
        assert late.row < 0 and late.reason is None
        assert simulation.step()
    run_checked(simulation)
    assert_same_as_solo(simulation, [*requests, late], rig)


class Stream(Load):
    """Prompts keep coming while one request decodes; notes when each of its tokens came."""

    def __init__(self, policy: str, overlap: bool) -> None:
        super().__init__(Rig(num_blocks=4000, max_num_seqs=8, budget=256, overlap=overlap), policy)
        self.times_ns: list[int] = []

    def after_step(self) -> None:
        stream = self.requests[0]
        if stream.num_generated > len(self.times_ns):
            self.times_ns.append(self.simulation.clock())


@ALL
@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_a_decoding_stream_never_waits_longer_than_one_full_step(policy: str, overlap: bool) -> None:
    load = Stream(policy, overlap)
    targets: dict[str, int | float] = {"ttft_slo_ns": 100_000_000, "tpot_slo_ns": 20_000_000}
    arrivals = [Arrival(0, 20, 200, 1, targets)]
    arrivals += [Arrival(i * 8_000_000, 500 if i % 3 else 60, 3, i % 2, targets) for i in range(1, 120)]
    load.run(arrivals, 10_000_000_000)
    gaps_ns = [b - a for a, b in zip(load.times_ns, load.times_ns[1:])]
    full = max(step_ns(plan) for plan in load.simulation.plans)
    assert len(gaps_ns) == 199 and full >= STEP_NS + 200 * TOKEN_NS, "steps were full"
    assert max(gaps_ns) <= STEP_NS + 256 * TOKEN_NS + 200, "one step, and the host's time"


def waiting_leader(simulation_budget: int, overlap: bool) -> tuple[Rig, list[Request]]:
    rig = Rig(num_blocks=200, budget=simulation_budget, overlap=overlap)
    shared = list(range(160))
    return rig, [make_request(str(i), [*shared, 500 + i, 600 + i], 4) for i in range(4)]


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize("budget", [64, 512])
def test_requests_wait_for_a_block_that_is_being_computed_and_share_it(budget: int, overlap: bool) -> None:
    rig, requests = waiting_leader(budget, overlap)
    simulation = rig.simulation()
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert_same_as_solo(simulation, requests, rig)
    assert all(State.WAIT_POLICY in r.buckets_ns for r in requests[1:])
    assert [r.cached_tokens for r in requests] == [0, 160, 160, 160]


def test_nobody_waits_for_a_block_of_a_leader_that_has_stopped() -> None:
    rig, requests = waiting_leader(64, overlap=False)
    simulation = rig.simulation()
    for request in requests[:2]:
        simulation.add(request)
    simulation.step()
    simulation.scheduler.pause(requests[0].id, simulation.clock())
    while simulation.scheduler.get(requests[1].key) is not None:
        assert simulation.step()
    simulation.scheduler.resume(requests[0].id, simulation.clock())
    run_checked(simulation)
    assert_same_as_solo(simulation, requests[:2], rig)


def test_what_a_request_near_the_head_has_cached_is_evicted_last() -> None:
    """The oldest prefix in the cache is that of the waiting request; a running one takes all other blocks."""
    rig = Rig(num_blocks=20, max_num_seqs=1, budget=512)
    simulation = rig.simulation()
    shared, others = list(range(64)), [[700 + i] * 48 for i in range(3)]
    for i, ids in enumerate((shared, *others)):
        simulation.add(make_request(f"first {i}", [*ids, 1], 1))
        run_checked(simulation)
    assert simulation.scheduler.cache.usage().cached == 4 + 9
    running, waiting = make_request("running", [9] * 30, 200), make_request("waiting", [*shared, 2, 3], 4)
    for request in (running, waiting):
        simulation.add(request)
    run_checked(simulation)
    assert_same_as_solo(simulation, [running, waiting], rig)
    assert waiting.cached_tokens == 64
