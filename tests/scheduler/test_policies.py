"""Orders and batchings on the same engine: who goes first, and when a batch may be joined."""

from __future__ import annotations

from steelyard.core.request import Request
from steelyard.core.timed import State
from steelyard.scheduler.batching.continuous import Continuous
from steelyard.scheduler.batching.dynamic import Dynamic
from steelyard.scheduler.batching.static import Static
from steelyard.scheduler.policies.fcfs import Fcfs
from steelyard.scheduler.policies.priority import Priority
from steelyard.sim.simulation import Simulation
from tests.scheduler.scheduler_rig import Rig, assert_same_as_solo, make_request, run_checked


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
