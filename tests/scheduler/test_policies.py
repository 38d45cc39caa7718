"""Orders and batchings on the same engine: who goes first, and when a batch may be joined."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.request import Request
from steelyard.core.timed import State
from steelyard.scheduler.batching.continuous import Continuous
from steelyard.scheduler.batching.dynamic import Dynamic
from steelyard.scheduler.batching.static import Static
from steelyard.scheduler.policies.fcfs import Fcfs
from steelyard.scheduler.policies.priority import MAX_DISPLACED, Priority
from steelyard.scheduler.rows import Resident
from steelyard.sim.simulation import Simulation
from tests.scheduler.scheduler_rig import POLICIES, Rig, assert_same_as_solo, make_request, run_checked


def entries(simulation: Simulation) -> list[list[int]]:
    """First prompt tokens of the requests that entered, step by step."""
    return [[enter.tokens[0] for enter in plan.enter] for plan in simulation.plans if plan.enter]


def requests_of(lengths: list[int], **fields: int) -> list[Request]:
    return [make_request(str(i), [i] * 5, length, **fields) for i, length in enumerate(lengths)]


def served(simulation: Simulation, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert_same_as_solo(simulation, requests, Rig())
    return entries(simulation)


def test_continuous_batching_fills_a_row_as_soon_as_it_is_free() -> None:
    simulation = Rig(max_num_seqs=2).simulation(batching=Continuous())
    assert served(simulation, requests_of([2, 6, 3, 3])) == [[0, 1], [2], [3]]


def test_static_batching_waits_for_the_last_of_a_batch() -> None:
    simulation = Rig().simulation(batching=Static(2))
    requests = requests_of([2, 6, 3, 3])
    assert served(simulation, requests) == [[0, 1], [2, 3]]
    assert requests[2].buckets_ns.keys() >= {State.WAIT_POLICY}


def test_dynamic_batching_starts_when_full_or_when_the_first_has_waited_long_enough() -> None:
    simulation = Rig().simulation(batching=Dynamic(3, max_wait_ns=1000))
    first, second = requests_of([2, 2])
    simulation.add(first)
    simulation.add(second)
    assert not simulation.step() and first.state is State.WAIT_POLICY
    simulation.clock.advance(1000)
    assert simulation.step()
    run_checked(simulation)
    for i in range(3):
        simulation.add(make_request(f"full {i}", [i + 5] * 5, 2, now_ns=simulation.clock()))
    assert simulation.step()
    run_checked(simulation)
    assert entries(simulation) == [[0, 1], [5, 6, 7]]


def test_fcfs_serves_in_order_of_arrival_whatever_the_priority() -> None:
    simulation = Rig(max_num_seqs=1).simulation(order=Fcfs())
    requests = [make_request(str(i), [i] * 5, 2, priority=-i) for i in range(3)]
    assert served(simulation, requests) == [[0], [1], [2]]


def test_priority_serves_lower_numbers_first_and_equals_in_order_of_arrival() -> None:
    simulation = Rig(max_num_seqs=1).simulation(order=Priority())
    requests = [make_request(str(i), [i] * 5, 2, priority=p) for i, p in enumerate((1, 0, 1, 0, -1))]
    assert served(simulation, requests) == [[4], [1], [3], [0], [2]]


def test_a_class_is_worth_so_much_waiting_and_no_more() -> None:
    simulation = Rig(max_num_seqs=1).simulation(order=Priority(aging_ns=1000))
    simulation.clock.advance(5000)
    requests = [
        make_request("old", [0] * 5, 2, priority=2),
        make_request("urgent", [1] * 5, 2, priority=0, now_ns=1999),
        make_request("too late", [2] * 5, 2, priority=0, now_ns=2001),
    ]
    assert served(simulation, requests) == [[1], [0], [2]]


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize("num_blocks", [8, 200], ids=["for-blocks", "for-a-row"])
def test_an_urgent_request_displaces_the_least_urgent_and_never_the_anchor(overlap: bool, num_blocks: int) -> None:
    rig = Rig(num_blocks=num_blocks, max_num_seqs=3 if num_blocks > 8 else 4, overlap=overlap, caching=False)
    simulation = rig.simulation(order=Priority())
    running = [make_request(str(p), [p] * 20, 30, priority=p) for p in (1, 2, 3)]
    for request in running:
        simulation.add(request)
    for _ in range(4):
        simulation.step()
    assert all(r.row >= 0 for r in running)
    urgent = make_request("urgent", [9] * 20, 30, priority=0, now_ns=simulation.clock())
    simulation.add(urgent)
    for _ in range(4):
        simulation.step()
        simulation.scheduler.check()
    assert urgent.row >= 0, "it did not wait for anybody to end"
    assert running[2].num_preemptions == 1 and running[0].num_preemptions == 0
    run_checked(simulation)
    assert_same_as_solo(simulation, [*running, urgent], rig)


def test_a_request_is_displaced_by_class_so_often_and_no_more() -> None:
    rig = Rig(max_num_seqs=2, caching=False)
    simulation = rig.simulation(order=Priority())
    requests = [make_request(str(i), [i] * 10, 200, priority=5 * i) for i in range(2)]
    for request in requests:
        simulation.add(request)
    for i in range(30):
        simulation.step()
        if i % 5 == 4:
            requests.append(make_request(f"u{i}", [i] * 5, 3, priority=1, now_ns=simulation.clock()))
            simulation.add(requests[-1])
    run_checked(simulation)
    assert requests[1].num_preemptions == MAX_DISPLACED
    assert_same_as_solo(simulation, requests, rig)


def test_equals_and_less_urgent_requests_displace_nobody() -> None:
    simulation = Rig(max_num_seqs=2).simulation(order=Priority())
    requests = [make_request(str(i), [i] * 10, 20, priority=1) for i in range(2)]
    requests += [make_request(str(i), [i] * 10, 20, priority=i % 3 + 1) for i in range(2, 8)]
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert simulation.scheduler.counters.preemptions == 0


@settings(max_examples=30)
@given(
    policy=st.sampled_from(POLICIES),
    overlap=st.booleans(),
    num_blocks=st.integers(6, 14),
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 2), st.sampled_from([None, 1, 50_000])),
        min_size=2,
        max_size=12,
    ),
)
def test_the_anchor_is_never_preempted_and_everybody_ends_under_every_order(
    policy: str, overlap: bool, num_blocks: int, shapes: list[tuple[int, int, int, int | None]]
) -> None:
    """The first running request in the order of the pass that preempts; requests come while others run."""
    rig = Rig(num_blocks=num_blocks, block_size=4, max_num_seqs=4, budget=24, overlap=overlap, max_model_len=72)
    rig = replace(rig, num_blocks=max(num_blocks, 18), caching=False)
    simulation = rig.simulation(policy=policy)
    live = simulation.scheduler._live
    preempt, tenants = live.preempt, ("a", "b", "c")

    def watched(resident: Resident, now_ns: int, swap: bool = False) -> None:
        assert resident is not live.rows.anchor()
        preempt(resident, now_ns, swap)

    live.preempt = watched  # type: ignore[method-assign]
    requests = []
    for i, (length, max_tokens, kind, target_ns) in enumerate(shapes):
        targets = {"ttft_slo_ns": target_ns, "tpot_slo_ns": target_ns}
        now_ns = simulation.clock()
        request = make_request(str(i), [i] * length, max_tokens, priority=kind, now_ns=now_ns, **targets)
        request.tenant = tenants[kind]
        requests.append(request)
        simulation.add(request)
        for _ in range(i % 4):
            simulation.step()
    run_checked(simulation)
    assert_same_as_solo(simulation, requests, rig)


def test_the_least_urgent_is_preempted_first() -> None:
    rig = Rig(num_blocks=9, caching=False)
    simulation = rig.simulation(order=Priority())
    requests = [make_request(str(i), [i] * 30, 40, priority=p) for i, p in enumerate((2, 0, 1))]
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert_same_as_solo(simulation, requests, rig)
    assert requests[0].num_preemptions > 0 and requests[1].num_preemptions == 0


def test_an_order_whose_keys_change_is_sorted_again_before_each_pass() -> None:
    class LastComeFirst(Fcfs):
        changes = True

        def key(self, request: Request, now_ns: int) -> tuple[float, ...]:
            return (-float(request.id),)

    simulation = Rig(max_num_seqs=1).simulation(order=LastComeFirst())
    assert served(simulation, requests_of([2, 2, 2])) == [[2], [1], [0]]


def test_a_batching_may_lower_the_budget_and_never_raise_it() -> None:
    class Capped(Continuous):
        def __init__(self, tokens: int) -> None:
            self.tokens = tokens

        def budget(self, *args: object) -> int | None:
            return self.tokens

    for asked, most in ((3, 3), (1000, 16)):
        simulation = Rig(budget=16).simulation(batching=Capped(asked))
        simulation.add(make_request("a", list(range(40)), 2))
        run_checked(simulation)
        assert max(plan.num_tokens for plan in simulation.plans) == most
