"""Where a request's time goes: known delays injected in one place move only their own bucket."""

from __future__ import annotations

import pytest

from steelyard.core.request import FinishReason, Request
from steelyard.core.timed import State
from steelyard.sim.simulation import Simulation
from tests.scheduler.scheduler_rig import Rig, make_request

PROMPT = list(range(40))
NUM_DECODES = 9


def serve(*, prefill_ns: int = 0, decode_ns: int = 0, host_ns: int = 0, wait_ns: int = 0) -> dict[State, int]:
    """One request of two chunks and ten tokens, one step at a time, on a clock that only moves as told."""
    base = Rig(budget=32).simulation(
        step_ns=lambda plan: sum(prefill_ns if work.start < 40 else decode_ns for work in plan.work)
    )
    simulation = Simulation(base.scheduler, base.runner, base.clock, host_ns=0, step_ns=base._step_ns)
    request = make_request("a", PROMPT, NUM_DECODES + 1)
    simulation.add(request)
    simulation.clock.advance(wait_ns)
    while simulation.scheduler.has_work:
        simulation.launch()
        simulation.clock.advance(host_ns)
        simulation.commit()
        simulation.scheduler.check()
    assert sum(request.buckets_ns.values()) == request.total_ns == simulation.clock.now_ns
    return request.buckets_ns


def test_each_delay_moves_its_own_bucket_and_no_other() -> None:
    assert serve() == {}
    assert serve(prefill_ns=100) == {State.PREFILL: 200}
    assert serve(decode_ns=10) == {State.DECODE: 10 * NUM_DECODES}
    assert serve(host_ns=3) == {State.ENGINE_GAP: 3 * (NUM_DECODES + 2)}
    assert serve(wait_ns=77) == {State.WAIT_STEP_BOUNDARY: 77}
    everything = serve(prefill_ns=100, decode_ns=10, host_ns=3, wait_ns=77)
    assert everything == {
        State.PREFILL: 200,
        State.DECODE: 10 * NUM_DECODES,
        State.ENGINE_GAP: 3 * (NUM_DECODES + 2),
        State.WAIT_STEP_BOUNDARY: 77,
    }


def test_a_preempted_request_is_charged_for_displacement_and_recompute_apart_from_prefill() -> None:
    simulation = Rig(num_blocks=8, caching=False).simulation()
    requests = [make_request(str(i), [i + 1] * 32, 60) for i in range(2)]
    for request in requests:
        simulation.add(request)
    simulation.run()
    first, second = requests
    assert second.num_preemptions > 0
    assert second.buckets_ns[State.PREEMPTED] > 0 and second.buckets_ns[State.RECOMPUTE] > 0
    assert State.PREEMPTED not in first.buckets_ns and State.RECOMPUTE not in first.buckets_ns
    # one step computes all that was lost, and the token after it, at 1,000 ns a token; the other row may add one
    lost = second.num_recomputed
    assert 1000 * lost <= second.buckets_ns[State.RECOMPUTE] <= 1000 * (lost + 2)


@pytest.mark.parametrize(("keep", "num_beyond"), [(10, 0), (8, 2), (5, 5)])
def test_time_since_the_last_kept_token_is_overshoot(keep: int, num_beyond: int) -> None:
    simulation = Rig().simulation(step_ns=lambda plan: 1000)
    request = make_request("a", PROMPT, 50)
    simulation.add(request)
    while request.num_generated < 10:
        simulation.step()
    simulation.clock.advance(7)
    simulation.take(simulation.scheduler.stop(request.key, FinishReason.STOP, simulation.clock(), keep))
    step_ns = 1000 + 100
    assert request.buckets_ns.get(State.OVERSHOOT) == num_beyond * step_ns + 7
    assert request.num_overshoot == num_beyond and request.num_generated == keep
    assert sum(request.buckets_ns.values()) == request.total_ns


def test_a_refused_request_has_a_closed_ledger() -> None:
    simulation = Rig(num_blocks=2).simulation()
    request = make_request("a", PROMPT, 10, now_ns=5)
    simulation.clock.advance(25)
    with pytest.raises(Exception, match="KV cache pool"):
        simulation.add(request)
    assert request.buckets_ns == {State.WAIT_STEP_BOUNDARY: 20} and request.state is State.ENDED


def test_settle_brings_running_ledgers_up_to_now_without_changing_what_they_end_with() -> None:
    def run(look: bool) -> Request:
        simulation = Rig().simulation()
        request = make_request("a", PROMPT, 10)
        simulation.add(request)
        while simulation.scheduler.has_work:
            simulation.step()
            if look and simulation.scheduler.has_work:
                simulation.scheduler.settle(simulation.clock())
                assert request.total_ns == simulation.clock.now_ns
        return request

    assert run(look=True).buckets_ns == run(look=False).buckets_ns
