"""`steelyard plan tune`: what its reasons say agrees with each other and with the plan they come from."""

from __future__ import annotations

import re
from typing import Any

import pytest

from steelyard.plan.captures import Buckets
from steelyard.plan.device import find_device
from steelyard.plan.memory import graphs_bytes
from steelyard.plan.models import find_model
from steelyard.plan.planner import Options
from steelyard.plan.report import to_json
from steelyard.plan.tune import Tuned, tune
from steelyard.plan.workload import Slo, Workload


def tuned(rate: float = 20, input_len: int = 1024, output_len: int = 256, **options: Any) -> Tuned:
    load = Workload.of(rate, input_len, output_len)
    return tune(find_model("llama-3.1-8b"), "llama-3.1-8b", Options(find_device("H200"), load=load, **options))


def reason(found: Tuned, parameter: str) -> str:
    return next(a.reason for a in found.advice if a.parameter == parameter)


@pytest.mark.parametrize("slo", [Slo(), Slo(0.5, 0.05)])
@pytest.mark.parametrize("lens", [(1024, 256), (4096, 1024), (100, 1)])
def test_no_step_is_longer_than_the_wait_at_most(lens: tuple[int, int], slo: Slo) -> None:
    found = tuned(5, *lens, slo=slo)
    (most,) = re.findall(r"([\d.]+) ms away at most", reason(found, "waiting window"))
    steps = re.findall(r"([\d.]+) ms", reason(found, "max_num_batched_tokens"))
    assert len(steps) == 3
    assert float(most) == max(map(float, steps))


def test_the_worst_gap_is_at_least_every_mean_step() -> None:
    plan = tuned().plan
    assert plan.capacity is not None
    point = plan.capacity.point
    assert point.full_step_s >= point.mixed_step_s > point.step_s > point.decode_step_s
    assert to_json(plan)["capacity"]["worst_gap_ms"] == point.full_step_s * 1e3


@pytest.mark.parametrize("rate", [0.2, 5, 20])
def test_what_is_said_to_be_captured_is_what_the_plan_paid_for_with_the_flags_of_the_command(rate: float) -> None:
    found = tuned(rate)
    said = reason(found, "graphs")
    flags = found.command.split()
    seqs, tokens = (int(flags[flags.index(f) + 1]) for f in ("--max-num-seqs", "--max-num-batched-tokens"))
    buckets = Buckets.of_model(found.plan.model.shape, seqs, tokens)
    assert buckets == found.plan.buckets
    assert found.plan.budget.graphs_bytes == graphs_bytes(buckets.num_graphs)
    total, rows, tokens = map(int, re.findall(r"(\d+) (?:are captured|sizes)", said))
    assert (total, rows, tokens) == (buckets.num_graphs, len(buckets.decode), len(buckets.mixed))
    for sizes in (buckets.decode, buckets.mixed):
        assert f"{sizes[0]}, " in said and f", {sizes[-1]})" in said


def test_sizes_to_capture_are_no_setting_to_type() -> None:
    found = tuned()
    assert not [a.parameter for a in found.advice if "size" in a.parameter and "_size" not in a.parameter]
    assert "are captured" not in reason(tuned(enforce_eager=True), "graphs")
