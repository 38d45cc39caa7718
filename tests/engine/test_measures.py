"""Steps of a known device carry the plan's floor, reach and estimate; a block's bytes are the plan's too."""

from __future__ import annotations

from dataclasses import replace

from steelyard.engine.ledgers import Ledgers
from steelyard.engine.measures import block_bytes, measure_on
from steelyard.plan.device import find_device
from steelyard.plan.models import find_model
from tests.engine.engine_harness import CAPS, Harness


def test_a_step_carries_its_floor_and_its_estimate() -> None:
    shape = find_model("llama-3-8b").shape
    caps = replace(CAPS, kv_layout="bfloat16/bfloat16/16", block_size=16)
    assert block_bytes(shape, caps) == (16 * 2 * 32 * 8 * 128 * 2,)
    assert block_bytes(shape, replace(caps, kv_layout="shadow")) == ()
    measure = measure_on(find_device("NVIDIA H200"), shape, caps)
    assert measure is not None
    harness = Harness()
    harness.engine.ledgers = Ledgers(8, harness.clock.now_ns, measure)
    harness.submit("a", [1] * 30, max_tokens=5)
    harness.run()
    steps = harness.engine.ledgers.steps(100)
    assert len(steps) > 4
    for step in steps:
        assert step["floor_ns"] * 1.2 > 16e9 / 4.8e12 * 1e9  # the weights are read once a step
        assert step["floor_ns"] <= step["estimate_ns"]
    assert steps[0]["floor_ns"] >= steps[-1]["floor_ns"] * 0.5
