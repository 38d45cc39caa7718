"""What is stopped gives row and blocks back within two steps, in every state, with and without overlap (case C01)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from steelyard.cache.manager import CacheManager
from steelyard.core.sampling import SamplingParams
from steelyard.engine.engine import Engine, EngineOptions
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.scripted import Script, ScriptedRunner
from steelyard.wire.messages import Accepted, Finished, Stop, Submit
from tests.server.real_engine import CAPS


def make(overlap: bool, max_rows: int = 4) -> Engine:
    caps = replace(CAPS, overlaps=overlap, max_rows=max_rows)
    cache = CacheManager(caps, True)
    scheduler = Scheduler(caps, cache, SchedulerOptions(overlap=overlap))
    runner = ScriptedRunner(caps, Script(2, (40,) * 250))
    return Engine(runner, cache, scheduler, EngineOptions("tiny", frozenset({2}), check_invariants=True))


def submit(engine: Engine, id: str, prompt_len: int, n: int = 1) -> None:
    sampling = SamplingParams(max_tokens=50, n=n, ignore_eos=True)
    assert isinstance(engine.submit(Submit(id, [5] * prompt_len, sampling)), Accepted)


def active(engine: Engine) -> int:
    return engine.cache.usage().active


def decoding(engine: Engine) -> None:
    submit(engine, "a", 40, n=3)
    while engine.scheduler.num_running < 3 or engine.scheduler.counters.generation_tokens < 9:
        engine.step()


def in_mid_prefill(engine: Engine) -> None:
    """Four steps of 64 tokens, two of them run."""
    submit(engine, "a", 200)
    for _ in range(2):
        engine.step()
    assert engine.scheduler.counters.generation_tokens == 0
    assert active(engine)


def paused(engine: Engine) -> None:
    decoding(engine)
    engine.pause("a")
    for _ in range(3):
        engine.step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("state", [decoding, in_mid_prefill, paused])
def test_a_stop_frees_all_blocks_within_two_steps(state: Callable[[Engine], None], overlap: bool) -> None:
    engine = make(overlap)
    state(engine)
    assert active(engine) > 0
    ended = [m for m in engine.stop(Stop("a", -1, "disconnect")) if isinstance(m, Finished)]
    assert ended and {m.reason for m in ended} == {"abort"}
    num_steps = 0
    while active(engine):
        assert num_steps < 2, f"{active(engine)} blocks are still held"
        engine.step()
        num_steps += 1
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 0)
    assert engine.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_in_the_queue_never_computes_anything(overlap: bool) -> None:
    engine = make(overlap, max_rows=1)
    submit(engine, "running", 20)
    for _ in range(3):
        engine.step()
    submit(engine, "waiting", 40)
    engine.step()
    assert engine.scheduler.num_waiting == 1
    [ended] = engine.stop(Stop("waiting", -1, "disconnect"))
    assert isinstance(ended, Finished)
    assert (ended.reason, ended.usage.computed_tokens) == ("abort", 0)
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 0)
    assert engine.check()
