"""Deadlines: beyond capacity most are met, the late are not lost, and steps are as short as TPOT needs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steelyard.core.request import Request
from steelyard.scheduler.policies.slo import BEST_EFFORT_NS, RELEGATED_SHARE, Slo, next_due_ns
from tests.scheduler.load_rig import STEP_NS, TOKEN_NS, Arrival, Load
from tests.scheduler.scheduler_rig import Rig, make_request

RIG = Rig(num_blocks=8000, max_num_seqs=32, budget=256, max_model_len=4096)
MS = 1_000_000
CAPACITY_PER_S = 1e9 / ((187.5 + 18.7 - 1) * (TOKEN_NS + STEP_NS / 256))
"""Full steps of requests of 187.5 prompt and 18.7 output tokens in the mean."""


def served(policy: str, load: float, ttft_ms: int, tpot_ms: int, seconds: float = 3.0) -> Load:
    """Poisson arrivals at `load` times the capacity."""
    run, rng, at_s = Load(RIG, policy), random.Random(1), 0.0
    arrivals: list[Arrival] = []
    targets: dict[str, int | float] = {"ttft_slo_ns": ttft_ms * MS, "tpot_slo_ns": tpot_ms * MS}
    while at_s < seconds:
        at_s += rng.expovariate(load * CAPACITY_PER_S)
        arrivals.append(Arrival(int(at_s * 1e9), rng.choice((50, 100, 200, 400)), rng.choice((8, 16, 32)), 0, targets))
    run.run(arrivals, int(seconds * 1e9))
    return run


def attainment(run: Load, settle_s: float = 1.0) -> float:
    """Of the requests that had time to end, how many met both targets."""
    end_ns = run.simulation.clock() - int(settle_s * 1e9)
    counted = [r for r in run.requests if r.start_ns <= end_ns]
    return sum(map(met, counted)) / len(counted)


def met(request: Request) -> bool:
    if request.reason is None or request.ttft_slo_ns is None or request.tpot_slo_ns is None:
        return False
    tpot_ns = (request.since_ns - request.first_token_ns) / max(1, request.num_generated - 1)
    return request.first_token_ns <= request.start_ns + request.ttft_slo_ns and tpot_ns <= request.tpot_slo_ns


def test_at_one_and_a_half_times_the_capacity_over_half_of_the_targets_are_met_where_fcfs_meets_few() -> None:
    slo, fcfs = served("slo", 1.5, 200, 10), served("fcfs", 1.5, 200, 10)
    assert attainment(slo) >= 0.55
    assert attainment(fcfs) < 0.3
    assert (
        slo.simulation.scheduler.counters.generation_tokens > 0.9 * fcfs.simulation.scheduler.counters.generation_tokens
    )


def test_a_tight_tpot_target_shortens_steps_and_is_met_where_fcfs_misses_it() -> None:
    slo, fcfs = served("slo", 0.7, 500, 4, 2.0), served("fcfs", 0.7, 500, 4, 2.0)
    assert attainment(slo) >= 0.95
    assert attainment(fcfs) < 0.85


@pytest.mark.parametrize("load", [1.5, 3.0])
def test_under_any_overload_all_that_came_are_served_in_the_end(load: float) -> None:
    run = served("slo", load, 50, 5, 0.5)
    assert any(r.slo_rank for r in run.requests), "some were relegated"
    run.simulation.run()
    assert all(r.reason is not None for r in run.requests)


def test_a_relegated_request_has_its_turn_within_a_known_number_of_admissions() -> None:
    """While requests in time come without end, one in RELEGATED_SHARE admissions is for the oldest of the late."""
    run = Load(Rig(num_blocks=4000, max_num_seqs=4, budget=256, max_model_len=4096), "slo")
    fast: dict[str, int | float] = {"ttft_slo_ns": 400 * MS}
    arrivals = [Arrival(i * 2 * MS, 200, 2, 0, fast) for i in range(300)]
    run.run(arrivals, 400 * MS)
    late = [make_request(f"late {i}", [i] * 100, 2, now_ns=run.simulation.clock(), ttft_slo_ns=1) for i in range(3)]
    for request in late:
        run.simulation.add(request)
    entered = sum(len(plan.enter) for plan in run.simulation.plans)
    for i, request in enumerate(late, 1):
        while request.row < 0 and request.reason is None:
            now_ns = run.simulation.clock()
            run.simulation.add(make_request(f"{now_ns}", [1] * 200, 2, now_ns=now_ns, ttft_slo_ns=400 * MS))
            assert run.simulation.step()
        assert request.slo_rank == -1
        assert sum(len(plan.enter) for plan in run.simulation.plans) - entered <= RELEGATED_SHARE * (i + 1)


class Flat:
    """A step takes 1,000 ns a token, whatever it is; a prompt as well."""

    def step_ns(self, num_tokens: int, num_rows: int, context_tokens: int) -> int:
        return 1000 * num_tokens

    def recompute_ns(self, num_tokens: int) -> int:
        return 1000 * num_tokens

    def swap_ns(self, num_tokens: int) -> int:
        return 0


def decoding(num_generated: int, tpot_slo_ns: int | None) -> Any:
    request = make_request("r", [1] * 10, 100, tpot_slo_ns=tpot_slo_ns)
    request.tokens += [0] * num_generated
    request.first_token_ns = 0
    return cast("Any", SimpleNamespace(request=request))


def test_the_budget_is_what_the_tightest_stream_has_time_for_and_never_less_than_a_share() -> None:
    order = Slo(Flat())
    relaxed, tight = decoding(10, 40_000), decoding(10, 15_000)
    assert order.budget([relaxed], 512, 300_000) == 100
    assert order.budget([relaxed, tight], 512, 100_000) == 50
    assert order.budget([relaxed, tight], 512, 149_000) == 2 + 512 // 16, "a share for prefills"
    assert order.budget([tight], 512, 900_000) == 1 + 512 // 16, "late: its own pace from now on, and no prefill stands"
    assert order.budget([decoding(10, None)], 512, 0) == 512
    assert order.budget([], 512, 0) == 512
    assert Slo(None).budget([tight], 512, 0) == 512


def test_the_key_is_the_deadline_and_the_work() -> None:
    order = Slo(Flat(), alpha=2.0)
    short, long = (
        make_request("s", [1] * 10, 5, ttft_slo_ns=500_000),
        make_request("l", [1] * 90, 5, ttft_slo_ns=400_000),
    )
    assert order.key(short, 0) == (0, 520_000) and order.key(long, 0) == (0, 580_000)
    free = make_request("f", [1] * 10, 5)
    assert order.key(free, 10 * BEST_EFFORT_NS) == (0, BEST_EFFORT_NS + 20_000), "without a target nobody is late"
    assert order.key(long, 350_000)[0] == 1 and order.key(long, 0)[0] == 1, "late for good"
    long.tokens.append(7)
    long.first_token_ns, long.tpot_slo_ns = 900_000, 1000
    assert order.key(long, 0) == (0, 400_000), "who has begun keeps its place"
    assert next_due_ns(long) == 901_000
