"""Scripted answers, however the scheduler cuts, preempts or overlaps the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.cache.manager import CacheManager
from steelyard.core.request import FinishReason, Request
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import KvGroup, RowEnter, RowWork, RunnerCaps, StepPlan, Want
from steelyard.errors import StartError
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.clock import VirtualClock
from steelyard.sim.scripted import Script, ScriptedRunner
from steelyard.sim.simulation import Simulation

EOS = 9
CAPS = RunnerCaps(
    block_size=4,
    num_blocks=(8,),
    groups=(KvGroup(1),),
    max_rows=4,
    max_model_len=64,
    max_batched_tokens=8,
    vocab_size=50,
    overlaps=True,
    fingerprint="scripted",
    kv_layout="none",
)
SCRIPT = Script(EOS, default=(1, 2, 3), answers={(5, 5, 5): tuple(range(10, 22))})


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_get_their_answers_and_then_the_end_of_text(overlap: bool) -> None:
    clock = VirtualClock()
    scheduler = Scheduler(CAPS, CacheManager(CAPS), SchedulerOptions(overlap=overlap))
    simulation = Simulation(scheduler, ScriptedRunner(CAPS, SCRIPT, clock=clock), clock)
    prompts = [[5, 5, 5], [6] * 11, [5, 5, 5], [7], [5, 5, 5]]
    requests = [
        Request(str(i), p, SamplingParams(max_tokens=20, seed=0), 0, stop_ids=frozenset({EOS}))
        for i, p in enumerate(prompts)
    ]
    for request in requests:
        simulation.add(request)
    simulation.run()
    answers = [[*range(10, 22), EOS] if p == [5, 5, 5] else [1, 2, 3, EOS] for p in prompts]
    assert [simulation.outputs[r.key] for r in requests] == answers
    assert all(r.reason is FinishReason.STOP for r in requests)
    assert scheduler.counters.preemptions > 0, "an answer goes on where it was cut"


def test_logprobs_come_where_wanted_in_the_shape_asked_for() -> None:
    runner = ScriptedRunner(CAPS, SCRIPT)
    params = SamplingParams(seed=0, logprobs=2, prompt_logprobs=1)
    want = Want.TOKEN | Want.TOP_LOGPROBS | Want.PROMPT_LOGPROBS
    plan = StepPlan(1, enter=(RowEnter(0, 1, (5, 5, 5), 3, 0, params),), work=(RowWork(0, 0, 3, want),))
    result = runner.collect(runner.launch(plan))
    [out] = result.rows
    assert out.ids == (10,) and out.logprobs is not None
    assert [token for token, _ in out.logprobs[0].top] == [10, 11]
    assert [len(entry.top) for entry in result.prompt_logprobs[0]] == [1, 1]


def test_the_delay_is_the_steps_device_time_and_steps_in_flight_queue_behind_each_other() -> None:
    clock = VirtualClock()
    runner = ScriptedRunner(CAPS, SCRIPT, delay=lambda plan: clock.__setattr__("now_ns", clock() + 100), clock=clock)
    one, two = runner.launch(StepPlan(1)), runner.launch(StepPlan(2))
    assert [runner.collect(step).timing.device_ns for step in (one, two)] == [100, 100]
    clock.advance(50)
    assert runner.collect(runner.launch(StepPlan(3))).timing.launch_ns == 250


def test_a_script_is_read_from_json_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"eos_token_id": 9, "default": [1], "answers": [{"prompt": [5, 6], "output": [7]}]}))
    assert Script.load(path) == Script(9, (1,), {(5, 6): (7,)})
    for text in ("{", '{"default": [1]}', '{"eos_token_id": 9, "answers": [{"prompt": 5, "output": []}]}'):
        path.write_text(text)
        with pytest.raises(StartError, match=r"script .*script\.json"):
            Script.load(path)
    with pytest.raises(StartError, match=r"missing\.json"):
        Script.load(tmp_path / "missing.json")


def test_a_virtual_clock_moves_only_forward() -> None:
    clock = VirtualClock(5)
    assert clock.advance(7) == clock() == 12
    with pytest.raises(AssertionError):
        clock.advance(-1)
