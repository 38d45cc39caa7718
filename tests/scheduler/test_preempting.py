"""Who gives way and how: swap and recompute give the tokens of no preemption; cost and the host's room choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steelyard.core.request import FinishReason, Request
from steelyard.core.timed import State
from steelyard.scheduler.policies.fcfs import Fcfs
from steelyard.scheduler.policies.priority import Priority
from steelyard.sim.simulation import Simulation
from tests.scheduler.scheduler_rig import (
    PerToken,
    Rig,
    assert_idle,
    assert_same_as_solo,
    make_choices,
    make_request,
    run_checked,
)

RIG = Rig(num_blocks=14, block_size=4, budget=64, vocab_size=40, num_host_blocks=64)
PROMPTS = [[i + 1] * (9 + 3 * i) for i in range(4)]


def served(rig: Rig, requests: list[Request] | None = None, **injected: Any) -> tuple[Simulation, list[Request]]:
    """Four requests that together do not fit, or those given, to the end; tokens are those of each alone."""
    simulation = rig.simulation(**injected)
    requests = requests or [make_request(str(i), p, 20) for i, p in enumerate(PROMPTS)]
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert_same_as_solo(simulation, requests, rig)
    assert_idle(simulation, requests)
    return simulation, requests


def num_swaps(simulation: Simulation) -> int:
    return sum(len(plan.swaps) for plan in simulation.plans)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (21,), ((21, 6),)], ids=str)
@pytest.mark.parametrize("budget", [64, 7], ids=["whole", "chunked"])
def test_swapped_requests_go_on_as_if_nothing_had_been(
    overlap: bool, caching: bool, windows: tuple[int | tuple[int, int] | None, ...], budget: int
) -> None:
    rig = replace(RIG, overlap=overlap, caching=caching, windows=windows, budget=budget)
    simulation, requests = served(rig)
    counters, host = simulation.scheduler.counters, simulation.scheduler.cache.host
    assert counters.swaps_out == counters.swaps_in == counters.preemptions > 0
    assert host.num_out > 0 and host.num_in > 0 and num_swaps(simulation) == host.num_out + host.num_in
    assert counters.recomputed_tokens == 0 and not any(r.num_recomputed for r in requests)


def test_forked_choices_are_swapped_with_what_they_share() -> None:
    choices = make_choices("n", [1, 2, 3, 4, 5, 6], 24, 4)
    simulation, _ = served(replace(RIG, num_blocks=16, overlap=True), choices)
    counters = simulation.scheduler.counters
    assert counters.forks == 3 and counters.swaps_in > 0 and counters.recomputed_tokens == 0


@pytest.mark.parametrize(("cost", "swaps"), [(PerToken(10, 4), True), (PerToken(10, 6), False)], ids=str)
def test_the_cheaper_way_is_taken_on_either_side_of_the_break_even(cost: PerToken, swaps: bool) -> None:
    simulation, _ = served(RIG, cost=cost)
    counters = simulation.scheduler.counters
    assert counters.preemptions > 0
    assert (counters.swaps_out > 0) == swaps and (counters.recomputed_tokens > 0) == (not swaps)


def test_a_host_without_room_leaves_recomputing() -> None:
    simulation, _ = served(replace(RIG, num_host_blocks=5, caching=False, num_blocks=12))
    counters = simulation.scheduler.counters
    assert counters.preemptions > counters.swaps_out > 0 and counters.recomputed_tokens > 0


def test_buckets_of_displacement_close_and_recompute_is_empty() -> None:
    simulation = RIG.simulation(step_ns=lambda plan: 1000)
    requests = [make_request(str(i), p, 20) for i, p in enumerate(PROMPTS)]
    for request in requests:
        simulation.add(request)
    simulation.run()
    swapped = [r for r in requests if r.num_preemptions]
    assert swapped
    for request in swapped:
        buckets = request.buckets_ns
        assert buckets[State.SWAP_OUT] > 0 and buckets[State.SWAPPED] > 0 and buckets[State.SWAP_IN] > 0
        assert State.PREEMPTED not in buckets and State.RECOMPUTE not in buckets
        assert buckets[State.SWAP_IN] == pytest.approx(
            1100 * request.num_preemptions, abs=100 * request.num_preemptions
        )
        assert sum(buckets.values()) == request.total_ns


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP, FinishReason.DEADLINE])
def test_the_end_of_a_swapped_request_frees_both_tiers(reason: FinishReason) -> None:
    simulation = replace(RIG, overlap=True).simulation()
    requests = [make_request(str(i), p, 20) for i, p in enumerate(PROMPTS)]
    for request in requests:
        simulation.add(request)
    ended: set[State] = set()
    while simulation.scheduler.has_work:
        assert simulation.step()
        away = [r for r in requests if r.state in (State.SWAP_OUT, State.SWAPPED) and r.state not in ended]
        for request in away:
            ended.add(request.state)
            before = simulation.scheduler.cache.host.usage().swapped
            simulation.take(simulation.scheduler.stop(request.key, reason, simulation.clock()))
            assert simulation.scheduler.cache.host.usage().swapped < before and request.state is State.ENDED
            simulation.scheduler.check()
    assert ended == {State.SWAP_OUT, State.SWAPPED}
    assert_idle(simulation, requests)


class Greedy(Fcfs):
    """Tenant "big" has more than its share."""

    def over_share(self, request: Request) -> bool:
        return request.tenant == "big"


def first_victim(requests: list[Request], **injected: Any) -> Request:
    """Who is preempted first of requests that came in this order, computed theirs, and now lack blocks."""
    simulation = replace(RIG, num_blocks=15, caching=False).simulation(**injected)
    for request in requests:
        simulation.add(request)
    while not any(r.num_preemptions for r in requests):
        assert simulation.step()
    [victim] = [r for r in requests if r.num_preemptions]
    return victim


def test_victims_are_over_their_share_then_of_the_lowest_class_then_cheap_then_young() -> None:
    def four(lens: tuple[int, ...], **fields: Any) -> list[Request]:
        requests = [make_request(str(i), [i] * n, 30, **fields) for i, n in enumerate(lens)]
        requests[1].tenant = "big"
        return requests

    cost = PerToken()
    alike, unlike = (12, 12, 12, 12), (12, 14, 9, 14)
    assert first_victim(four(alike), cost=cost).id == "3"
    assert first_victim(four(unlike), cost=cost).id == "2"
    assert first_victim(four(unlike), cost=cost, order=Greedy()).id == "1"
    classes = four(unlike)
    classes[3].priority = 5
    assert first_victim(classes, cost=cost, order=Priority()).id == "3"
    anchor = four((9, 14, 14, 14))
    assert first_victim(anchor, cost=cost).id != "0", "the first in order has least to lose and is never preempted"


def test_an_evicted_prefix_comes_back_from_the_host_where_copying_is_cheaper() -> None:
    def again(cost: PerToken | None) -> tuple[Simulation, Request]:
        simulation = replace(RIG, num_blocks=10, overlap=True).simulation(cost=cost)
        requests = [make_request(str(i), [i] * 30, 3, now_ns=0) for i in range(3)]
        requests.append(make_request("again", [0] * 30, 3))
        for request in requests:
            simulation.add(request)
            run_checked(simulation)
        assert_same_as_solo(simulation, requests, RIG)
        return simulation, requests[-1]

    for cost in (None, PerToken(10, 9)):
        simulation, request = again(cost)
        assert request.cached_tokens == 28 and simulation.scheduler.counters.host_hits_tokens == 28
    simulation, request = again(PerToken(10, 11))
    assert request.cached_tokens == 0 and simulation.scheduler.counters.host_hits_tokens == 0


def test_a_dropped_namespace_is_gone_from_the_host_and_no_tenant_finds_anothers_blocks_there() -> None:
    simulation = replace(RIG, num_blocks=10).simulation()
    cache = simulation.scheduler.cache

    def probe(tenant: int) -> int:
        return cache.match(make_request("probe", [7] * 30, 3, tenant=tenant), from_host=True)

    requests = [make_request(str(i), [7] * 30, 3, tenant=i) for i in range(1, 5)]
    for request in requests:
        simulation.add(request)
        run_checked(simulation)
    assert [probe(tenant) for tenant in range(6)] == [0, 28, 28, 28, 28, 0]
    assert cache.host.usage().cached >= 14
    assert cache.drop(requests[0].namespace) >= 7
    assert [probe(tenant) for tenant in range(6)] == [0, 0, 28, 28, 28, 0]
    cache.drop(None)
    usage = cache.host.usage()
    assert usage.clean == usage.total and not any(probe(tenant) for tenant in range(6))


def test_a_request_swapped_while_its_namespace_is_dropped_returns_and_publishes_nothing() -> None:
    simulation = RIG.simulation()
    requests = [make_request(str(i), p, 20, tenant=i) for i, p in enumerate(PROMPTS, 1)]
    for request in requests:
        simulation.add(request)
    while not (away := [r for r in requests if r.state is State.SWAPPED]):
        assert simulation.step()
    cache = simulation.scheduler.cache
    cache.drop(away[0].namespace)
    run_checked(simulation)
    assert_same_as_solo(simulation, requests, RIG)
    probe = make_request("probe", away[0].tokens, 3, tenant=requests.index(away[0]) + 1)
    assert away[0].reason is FinishReason.LENGTH and cache.match(probe, from_host=True) == 0


@pytest.mark.parametrize("num_host_blocks", [0, 64], ids=["recompute", "swap"])
def test_a_displaced_request_that_is_cut_short_by_its_stop_leaves_the_queue(num_host_blocks: int) -> None:
    simulation = replace(RIG, num_host_blocks=num_host_blocks, budget=64).simulation()
    requests = [make_request(str(i), [i + 1] * 15, 24) for i in range(3)]
    for request in requests:
        simulation.add(request)
    while not (away := [r for r in requests if r.num_preemptions]):
        assert simulation.step()
    assert len(away[0].tokens) > 16 >= away[0].prompt_len, "long while it waits, short once it is cut"
    simulation.take(simulation.scheduler.stop(away[0].key, FinishReason.STOP, simulation.clock(), keep=0))
    run_checked(simulation)
    assert_idle(simulation, requests)


def test_a_preempted_prompt_that_another_has_computed_meanwhile_is_cached_and_not_its_own() -> None:
    simulation = Rig(block_size=8, budget=16, max_num_seqs=2).simulation(policy="priority")
    prompt = list(range(60))
    anchor, late = make_request("anchor", [99], 80), make_request("late", prompt, 4, priority=5)
    urgent = make_request("urgent", prompt, 1, priority=1)
    for request in (anchor, late):
        simulation.add(request)
    while not late.num_computed:
        assert simulation.step()
    simulation.add(urgent)
    run_checked(simulation)
    books: Any = simulation.books
    [account] = books.accounts.of("late")
    tokens = account.tokens()
    assert late.num_preemptions == 1 and tokens["cached"] > 0
    assert tokens["computed"] == 60 - tokens["cached"] + 4 - 1 + tokens["recomputed"]
