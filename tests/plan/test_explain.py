"""A plan's words: a reader with targets finds each beside its estimate, what one replica serves, and what binds."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.plan.device import find_device
from steelyard.plan.explain import CONSTRAINTS, figures
from steelyard.plan.models import find_model
from steelyard.plan.planner import Options, Plan, make_plan
from steelyard.plan.workload import Slo, Workload


def planned(slo: Slo, device: str = "H200", max_num_seqs: int = 1024) -> Plan:
    load = Workload.of(5, 4096, 1024)
    options = Options(find_device(device), load=load, slo=slo, max_num_seqs=max_num_seqs)
    return make_plan(find_model("llama-3.1-8b"), options)


def said(plan: Plan) -> dict[str, str]:
    return {f.label: f.text for f in figures(plan) if f.section == "capacity"}


def test_each_target_stands_beside_its_estimate_and_nowhere_else() -> None:
    both, neither = said(planned(Slo(0.5, 0.015, 0.95))), said(planned(Slo()))
    assert both["TTFT mean / p90 / p99"].endswith(" ms; target 500 ms for 95% of requests")
    assert both["TPOT"].endswith(" ms; target 15 ms")
    assert not [text for text in neither.values() if "target" in text]
    assert set(both) == set(neither) >= {"worst gap", "one replica serves", "binds"}


@pytest.mark.parametrize(
    ("slo", "device", "seqs", "first"),
    [
        (Slo(None, 0.015), "H200", 1024, "tpot"),
        (Slo(0.15, None), "H200", 1024, "ttft"),
        (Slo(), "H200", 8, "max_num_seqs"),
        (Slo(), "H200", 1024, "kv_memory"),
    ],
)
def test_what_binds_is_said_in_words_with_the_rate_of_one_replica(slo: Slo, device: str, seqs: int, first: str) -> None:
    plan = planned(slo, device, seqs)
    found = plan.capacity
    assert found is not None and found.constraints[0].name == first
    words = said(plan)
    rate = f"{found.replica_capacity:.3g} requests/s"
    assert words["one replica serves"].startswith(rate)
    assert words["binds"].startswith(f"{CONSTRAINTS[first]}, at {rate} a replica")
    assert f"next {CONSTRAINTS[found.constraints[1].name]}, at " in words["binds"]


def test_the_readme_quotes_what_the_plan_says() -> None:
    plan = planned(Slo(0.5, 0.015))
    found = plan.capacity
    assert found is not None and found.replicas == 2
    latency, gap = found.latency, found.point.full_step_s
    quoted = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert f"one replica serves {found.replica_capacity:.3g} requests/s within the targets, so two are" in quoted
    said = f"TTFT is {latency.ttft_p90_s * 1e3:.0f} ms for 90 % of requests, TPOT {latency.tpot_s * 1e3:.1f} ms"
    assert f"{said}, the worst gap between tokens {gap * 1e3:.0f} ms" in quoted
    assert f"the TPOT target binds, and KV memory would at {found.constraints[1].rate:.3g} requests/s" in quoted
