"""Blocks kept free at admission: a watermark, and a share of outputs to come that preemptions teach."""

from __future__ import annotations

import pytest

from steelyard.core.request import Request
from steelyard.scheduler.reserve import Reserve
from steelyard.sim.simulation import Simulation
from tests.scheduler.scheduler_rig import Rig, assert_same_as_solo, make_request, run_checked


def running(num: int) -> tuple[Simulation, list[Request]]:
    simulation = Rig(num_blocks=100).simulation()
    requests = [make_request(str(i), [i] * 16, 160) for i in range(num)]
    for request in requests:
        simulation.add(request)
    simulation.step()
    return simulation, requests


def test_nothing_is_kept_while_nobody_runs_and_a_watermark_while_somebody_does() -> None:
    simulation, _ = running(0)
    assert Reserve(simulation.scheduler._live, 0.05).blocks() == 0
    simulation, _ = running(2)
    assert Reserve(simulation.scheduler._live, 0.05).blocks() == 5


def test_the_share_rises_with_preemptions_and_fades_without() -> None:
    simulation, _ = running(2)
    reserve = Reserve(simulation.scheduler._live, 0.05)
    simulation.scheduler.counters.preemptions += 2
    reserve.observe()
    assert reserve.share == pytest.approx(0.2)
    lacking = 2 * (176 - 17)
    assert reserve.blocks() == 5 + -(-lacking * 2 // 10 // 16)
    for _ in range(200):
        reserve.observe()
    assert 0.05 < reserve.share < 0.1
    simulation.scheduler.counters.preemptions += 100
    reserve.observe()
    assert reserve.share == 1.0
    for _ in range(1000):
        reserve.observe()
    assert reserve.share == 0.0


def served(overlap: bool) -> Simulation:
    rig = Rig(num_blocks=30, max_num_seqs=8, overlap=overlap, caching=False)
    simulation = rig.simulation()
    requests = [make_request(str(i), [i] * 20, 80) for i in range(60)]
    for request in requests:
        simulation.add(request)
    run_checked(simulation)
    assert_same_as_solo(simulation, requests[::10], rig)
    return simulation


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_in_a_pool_that_is_short_what_is_learned_saves_preemptions(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = served(overlap).scheduler.counters
    monkeypatch.setattr(Reserve, "observe", lambda self: None)
    fixed = served(overlap).scheduler.counters
    assert 0 < 2 * learned.preemptions <= fixed.preemptions
    assert learned.recomputed_tokens < fixed.recomputed_tokens
    assert learned.steps < 1.2 * fixed.steps
