"""What is taken in ends, what never could is refused with the limit in its way: nothing waits for ever."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from steelyard.cache.contiguous import Reserve, whole_request
from steelyard.cache.manager import CacheManager
from steelyard.core.request import FinishReason
from steelyard.core.step import RunnerCaps
from steelyard.errors import ContextLengthExceeded
from steelyard.scheduler.admission import Bound, bound_of
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.clock import VirtualClock
from steelyard.sim.shadow import ShadowRunner
from steelyard.sim.simulation import Simulation
from tests.scheduler.scheduler_rig import Rig, assert_idle, make_request, run_checked, tenant_of

WINDOWS: dict[str, tuple[int | tuple[int, int] | None, ...]] = {
    "full": (None,),
    "windowed": (20,),
    "aligned": (17,),
    "both": (None, 20),
    "sinks": ((20, 4),),
}
TAKES = {
    "chunks": (SchedulerOptions(), None),
    "chunks, overlapping": (SchedulerOptions(overlap=True), None),
    "whole": (SchedulerOptions(chunked_prefill=False), None),
    "whole, overlapping": (SchedulerOptions(chunked_prefill=False, overlap=True), None),
    "contiguous": (SchedulerOptions(), whole_request),
}


def simulation_of(caps: RunnerCaps, options: SchedulerOptions, reserve: Reserve | None) -> Simulation:
    clock = VirtualClock()
    scheduler = Scheduler(caps, CacheManager(caps, reserve is None, reserve), options)
    return Simulation(scheduler, ShadowRunner(caps, secret_of=tenant_of, clock=clock), clock)


@pytest.mark.parametrize("takes", TAKES)
@pytest.mark.parametrize("windows", WINDOWS)
def test_every_length_up_to_the_bound_ends_and_every_longer_one_is_refused(windows: str, takes: str) -> None:
    options, reserve = TAKES[takes]
    rig = Rig(num_blocks=6, block_size=8, max_num_seqs=2, max_model_len=256, windows=WINDOWS[windows])
    caps = replace(rig.caps(), overlaps=options.overlap)
    ended = []
    for prompt_len in (1, 20, 44, 45, 46, 100, 252, 253):
        simulation = simulation_of(caps, options, reserve)
        request = make_request("r", list(range(1, prompt_len + 1)), max_tokens=4)
        try:
            simulation.add(request)
        except ContextLengthExceeded:
            continue
        simulation.run()
        assert request.reason is FinishReason.LENGTH and len(simulation.outputs[request.key]) == 4
        ended.append(prompt_len)
    at_once = options.whole_prompts or reserve is not None or None in WINDOWS[windows]
    # 6 blocks of 8 hold all but the last of 49 tokens; through a window they hold a context of 256
    assert ended == ([1, 20, 44, 45] if at_once else [1, 20, 44, 45, 46, 100, 252])


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapping"])
def test_whole_prompts_that_are_preempted_come_back_through_a_window(overlap: bool) -> None:
    rig = Rig(num_blocks=6, block_size=8, max_num_seqs=3, max_model_len=256, windows=(20,))
    options = SchedulerOptions(chunked_prefill=False, overlap=overlap)
    simulation = simulation_of(replace(rig.caps(), overlaps=overlap), options, None)
    requests = [make_request(f"r{i}", list(range(i, i + 15)), max_tokens=33) for i in range(3)]
    for request in requests:
        simulation.add(request)
    simulation.run()
    assert simulation.scheduler.counters.preemptions > 0
    assert [len(simulation.outputs[request.key]) for request in requests] == [33, 33, 33]


def bound(num_blocks: int, step_tokens: int, *, whole_prompts: bool) -> Bound:
    rig = Rig(num_blocks=num_blocks, block_size=8, max_model_len=256)
    return bound_of(CacheManager(rig.caps()), step_tokens, whole_prompts)


def test_the_bound_is_the_pool_or_the_step_that_must_hold_a_whole_prompt() -> None:
    assert bound(6, 16, whole_prompts=False).tokens == 48
    assert bound(6, 64, whole_prompts=True).tokens == 48
    step = bound(6, 16, whole_prompts=True)
    assert (step.tokens, step.option) == (16, "--max-num-batched-tokens") and "a step computes 16 tokens" in step.why


def test_a_prompt_longer_than_a_step_is_refused_where_it_must_be_whole() -> None:
    rig = Rig(budget=32)
    simulation = simulation_of(rig.caps(), SchedulerOptions(chunked_prefill=False), None)
    with pytest.raises(ContextLengthExceeded, match="with 4 of max_tokens needs 40, but a step computes 32 tokens"):
        simulation.add(make_request("long", list(range(36)), max_tokens=4))
    fits = make_request("fits", list(range(29)), max_tokens=4)
    simulation.add(fits)
    simulation.run()
    assert fits.reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("num_blocks", "why", "other"),
    [
        (64, "the context length is 256 tokens", "pool"),
        (6, "the KV cache pool holds 48 tokens of one request", "context"),
    ],
)
def test_a_refusal_names_the_limit_in_the_way_and_no_other(num_blocks: int, why: str, other: str) -> None:
    rig = Rig(num_blocks=num_blocks, block_size=8, max_model_len=256)
    with pytest.raises(ContextLengthExceeded) as caught:
        rig.simulation().add(make_request("r", [1] * 10, max_tokens=900))
    assert caught.value.param == "max_tokens" and other not in caught.value.message
    assert caught.value.message == (
        f"prompt has 10 tokens and with 900 of max_tokens needs 910, but {why}; shorten the prompt or lower max_tokens"
    )


def test_a_request_that_does_not_fit_an_empty_pool_is_a_broken_law_and_no_wait() -> None:
    simulation = Rig(num_blocks=4, block_size=8).simulation()
    simulation.scheduler.bound = Bound(1000, "a bound that is wrong", "")
    simulation.add(make_request("r", [1] * 100))
    with pytest.raises(AssertionError, match="nobody else has a block"):
        simulation.step()


def test_at_random_sizes_whatever_is_taken_in_ends() -> None:
    rng, taken, refused, preemptions = Random(3), 0, 0, 0
    for _ in range(300):
        options, reserve = rng.choice(list(TAKES.values()))
        rig = Rig(
            num_blocks=rng.randint(2, 14),
            block_size=rng.choice([1, 4, 8]),
            max_num_seqs=rng.randint(1, 5),
            budget=rng.choice([8, 64, 300]),
            max_model_len=rng.choice([50, 120]),
            windows=rng.choice(
                [(None,), (rng.randint(1, 40),), (None, rng.randint(1, 40)), ((rng.randint(1, 30), 5),)]
            ),
        )
        simulation = simulation_of(replace(rig.caps(), overlaps=options.overlap), options, reserve)
        requests = [make_request(f"r{i}", [i] * rng.randint(1, 60), max_tokens=rng.randint(1, 40)) for i in range(6)]
        for request in requests:
            try:
                simulation.add(request)
            except ContextLengthExceeded:
                refused += 1
                continue
            taken += 1
        run_checked(simulation)
        assert_idle(simulation, requests)
        preemptions += simulation.scheduler.counters.preemptions
    assert min(taken, refused) > 400 and preemptions > 40
