"""Steady states, constraints, replicas, cost: consistent with queueing theory and with themselves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steelyard.errors import StartError
from steelyard.plan.capacity import capacity, constraints, knee, price, sensitivity, solve
from steelyard.plan.device import find_device
from steelyard.plan.models import find_model
from steelyard.plan.planner import Options, make_plan
from steelyard.plan.queueing import Little, mean_wait, share_waiting_less, wait_quantile
from steelyard.plan.records import read_records
from steelyard.plan.service import Service, latency
from steelyard.plan.workload import Arrival, Slo, Workload, from_trace, read_trace
from tests.plan.setups import exact, make_roofline, make_service

RECORDS = Path(__file__).parents[2] / "benchmarks/results/h200-steps.jsonl"
SERVICE = make_service()
NONE = Slo()
loads = st.builds(Workload.of, st.floats(0.05, 3.0), st.integers(1, 6000), st.integers(1, 1500))


class TestQueueing:
    @pytest.mark.parametrize(("rate", "expected"), [(1, 0.1056), (5, 0.15), (9, 0.55)])
    def test_m_d_1_time_to_first_token(self, rate: float, expected: float) -> None:
        assert 0.1 + mean_wait(rate, 0.1) == pytest.approx(expected, abs=5e-5)

    def test_overload_waits_forever(self) -> None:
        assert mean_wait(10.0, 0.1) == math.inf
        assert share_waiting_less(100.0, 1.0, math.inf) == 0.0

    @given(st.floats(0.01, 0.99), st.floats(0.001, 10), st.floats(0.5, 0.999))
    def test_quantile_and_share_are_inverse(self, load: float, wait: float, share: float) -> None:
        at = wait_quantile(share, load, wait)
        assert share_waiting_less(at, load, wait) == pytest.approx(max(share, 1.0 - load))

    def test_mean_of_the_tail_is_the_mean_wait(self) -> None:
        load, wait, step = 0.7, 0.4, 1e-3
        area = sum((1 - share_waiting_less(k * step, load, wait)) * step for k in range(20_000))
        assert area == pytest.approx(wait, rel=2e-3)

    def test_little_finds_what_was_not_counted(self) -> None:
        assert Little(427.0, 103.0, 4.14).residual < 0.01
        assert Little(128.0, 103.0, 4.14).residual > 0.05


@given(loads)
@example(Workload.of(3.0, 3545, 1500))  # a hair more than full steps reach
@example(Workload.of(2.9, 3545, 1500))
@settings(max_examples=60)
def test_the_fixed_point_holds_and_littles_law_with_it(load: Workload) -> None:
    point = solve(SERVICE, load)
    if point is None:
        assert SERVICE.at(load, SERVICE.full(load)).rate < load.rate
        return
    assert point.rate == pytest.approx(load.rate, rel=1e-4)
    assert point.decoding == pytest.approx(load.rate * load.decode_steps * point.tpot_s, rel=1e-4)
    seen = latency(load, point, NONE)
    assert seen.little.residual < 1e-3
    assert seen.in_flight == pytest.approx(load.rate * seen.e2e_s, rel=1e-3)
    assert seen.ttft_s <= seen.ttft_p99_s or seen.wait_s == 0 or seen.ttft_p99_s >= point.prefill_s
    assert seen.ttft_p90_s <= seen.ttft_p99_s


def test_what_a_few_rows_save_leaves_capacity_growing_with_the_rows() -> None:
    """A plan fitted to records, where 16 rows are cheaper than the fixed cost of 17: who may hold 17 holds no less."""
    fitted = tuple(r for r in read_records(RECORDS) if r.workload.startswith("qwen3-0.6b s"))
    device, load, limits = find_device("H200"), Workload.of(50.0, 32, 256), []
    for seqs in (8, 15, 16, 17, 20, 32):
        options = Options(device, max_num_seqs=seqs, records=fitted, load=load, replicas=1)
        plan = make_plan(find_model("qwen3-0.6b"), options)
        assert plan.calibration.few > 0 and plan.calibration.lone < 0.6 and plan.capacity is not None
        limits.append(plan.capacity.replica_capacity)
        assert plan.capacity.knee_batch > 64
    assert limits == sorted(limits)


@given(loads, st.floats(1.05, 3.0))
@settings(max_examples=40)
def test_a_higher_rate_never_lowers_batch_or_latency(load: Workload, factor: float) -> None:
    near, far = solve(SERVICE, load), solve(SERVICE, replace(load, rate=load.rate * factor))
    if near is None or far is None:
        assert far is None
        return
    assert far.decoding >= near.decoding * (1 - 1e-6)
    assert far.tpot_s >= near.tpot_s * (1 - 1e-3)


def test_beyond_what_full_steps_reach_there_is_no_steady_state() -> None:
    load = Workload.of(1.0, 4096, 128)
    limit = constraints(SERVICE, load, NONE)[-1]
    assert limit.name == "device_time"
    assert solve(SERVICE, replace(load, rate=limit.rate * 1.01)) is None
    assert solve(SERVICE, replace(load, rate=limit.rate * 0.99)) is not None


def test_decode_only_throughput_is_running_over_time_per_token() -> None:
    """At efficiency one and with a prompt of one token: B / T(B), T by hand."""
    roofline = make_roofline()
    service = Service(roofline, exact(roofline), SERVICE.limits)
    load = Workload.of(10.0, 1, 1001)
    point = solve(service, load)
    assert point is not None
    context = 1 + 1001 // 2
    weights_s = 2 * roofline.setup.shape.read_parameters / 4.8e12
    row_s = (131_072 * (context + 31) + roofline.costs.passed_bytes(1, 1)) / 4.8e12
    by_hand = 10.0 * 1000 * weights_s / (1 - 10.0 * 1000 * row_s)  # B = rate * steps * (weights + B * row)
    assert point.decoding == pytest.approx(by_hand, rel=0.02)


def test_a_server_bound_by_its_sequence_cap_is_recognised() -> None:
    """128 running at 19.5 ms give 6,560 tokens a second: a cap on sequences binds long before the device."""
    service = make_service("llama-3.1-8b", "H100", kv_gib=50, seqs=128)
    found = constraints(service, Workload.of(50, 204, 62), NONE)
    assert found[0].name == "max_num_seqs"
    assert found[0].decoding == pytest.approx(128, rel=0.1)
    assert found[-1].name == "device_time"
    assert found[-1].rate > found[0].rate


@pytest.mark.parametrize(
    ("changed", "slo", "expected"),
    [
        ({"kv_gib": 20.0}, NONE, "kv_memory"),
        ({"seqs": 8}, NONE, "max_num_seqs"),
        ({}, Slo(tpot_s=0.010), "tpot"),
        ({}, Slo(ttft_s=0.150), "ttft"),
    ],
)
def test_each_constraint_binds_where_it_is_made_tight(changed: dict[str, float], slo: Slo, expected: str) -> None:
    service = make_service(**changed)  # type: ignore[arg-type]
    found = constraints(service, Workload.of(1.0, 4096, 1024), slo)
    assert found[0].name == expected
    assert [c.rate for c in found] == sorted(c.rate for c in found)


@given(st.floats(10, 100), st.floats(1.0, 2.0), st.integers(500, 5000), st.integers(10, 1000))
@settings(max_examples=25)
def test_more_memory_never_serves_less(kv_gib: float, factor: float, prompt: int, output: int) -> None:
    load = Workload.of(1.0, prompt, output)
    small, large = (make_service(kv_gib=g) for g in (kv_gib, kv_gib * factor))
    assert small.max_sequences(load) <= large.max_sequences(load)
    assert constraints(small, load, NONE)[0].rate <= constraints(large, load, NONE)[0].rate * (1 + 1e-6)


@given(st.floats(1.0, 1.5), st.sampled_from([Slo(), Slo(0.5, 0.05), Slo(tpot_s=0.02)]))
@settings(max_examples=15)
def test_looser_targets_never_serve_less(factor: float, slo: Slo) -> None:
    load = Workload.of(1.0, 2048, 256)
    loose = Slo(slo.ttft_s and slo.ttft_s * factor, slo.tpot_s and slo.tpot_s * factor)
    assert constraints(SERVICE, load, slo)[0].rate <= constraints(SERVICE, load, loose)[0].rate * (1 + 1e-6)


def test_replicas_are_as_few_as_meet_the_targets() -> None:
    load, slo = Workload.of(40.0, 4096, 256), Slo(0.5, 0.05)
    found = capacity(SERVICE, load, slo)
    assert found.feasible
    assert found.replicas * found.replica_capacity >= load.rate > (found.replicas - 1) * found.replica_capacity
    assert found.latency.attainment >= 0.9
    assert found.latency.tpot_s <= 0.05
    assert found.goodput == pytest.approx(load.rate * found.latency.attainment, rel=1e-3)
    assert found.output_tokens_per_s == pytest.approx(40 * 256, rel=1e-3)
    assert 0 < found.utilisation <= 1


def test_too_few_replicas_serve_what_they_can_and_meet_nothing() -> None:
    found = capacity(SERVICE, Workload.of(40.0, 4096, 256), Slo(0.5, 0.05), replicas=1)
    assert not found.feasible
    assert found.goodput == 0.0
    assert found.utilisation > 1
    assert found.served_rate == pytest.approx(found.replica_capacity, rel=1e-3)


def test_a_target_that_one_request_alone_misses_is_refused_by_name() -> None:
    with pytest.raises(StartError, match=r"no rate meets --tpot on H200") as caught:
        capacity(SERVICE, Workload.of(1.0, 256, 128), Slo(tpot_s=0.001))
    assert caught.value.param == "tpot"
    with pytest.raises(StartError, match="KV pool of H200 holds 0 requests"):
        capacity(make_service(kv_gib=0.1), Workload.of(1.0, 4096, 128), NONE)


def test_prompts_only_have_no_time_per_token() -> None:
    found = capacity(SERVICE, Workload.of(5.0, 4096, 1), Slo(1.0, 0.001))
    assert found.point.decoding == 0
    assert price(found, 3.0, 1).per_million_output == 0.0


def test_the_knee_is_where_rows_cost_as_much_as_weights() -> None:
    roofline = make_roofline()
    service = Service(roofline, exact(roofline), SERVICE.limits)
    load = Workload.of(1.0, 4096, 1024)
    weights, row = 2 * roofline.setup.shape.read_parameters, 131_072 * 4608
    assert knee(service, load) == pytest.approx(weights / row, rel=0.15)


def test_cost_shares_add_up_to_the_price_of_the_device() -> None:
    found = capacity(SERVICE, Workload.of(10.0, 2048, 512), Slo(0.5, 0.05))
    cost = price(found, 4.0, 2)
    per_request = (cost.per_million_input * 2048 + cost.per_million_output * 512) / 1e6
    assert per_request * found.replica_capacity * 3600 == pytest.approx(8.0)


def test_sensitivity_names_the_resource_that_binds() -> None:
    decode_bound = sensitivity(SERVICE, Workload.of(1.0, 256, 1024), Slo(tpot_s=0.008))
    factors = {c.name: c.factor for c in decode_bound}
    assert factors["bandwidth +10%"] > factors["arithmetic +10%"] >= 1.0
    assert factors["KV of half the bytes"] > 1.0
    prefill_bound = sensitivity(SERVICE, Workload.of(1.0, 4096, 4), Slo(ttft_s=0.5))
    factors = {c.name: c.factor for c in prefill_bound}
    assert factors["arithmetic +10%"] > 1.08
    assert factors["KV memory +10%"] == pytest.approx(1.0)
    memory_bound = sensitivity(make_service(kv_gib=8.0), Workload.of(1.0, 2048, 1024), NONE)
    assert memory_bound[0].name == "KV of half the bytes"
    assert {c.name: c.factor for c in memory_bound}["KV memory +10%"] > 1.04


def test_a_faster_device_serves_more() -> None:
    load = Workload.of(1.0, 1024, 256)
    rates = [
        constraints(make_service(device=find_device(d), kv_gib=20), load, NONE)[0].rate
        for d in ("L40S", "A100", "H100", "H200")
    ]
    assert rates == sorted(rates)


class TestTraces:
    def test_context_is_weighted_by_decode_steps(self) -> None:
        arrivals = [Arrival(0.0, 100, 1001), Arrival(1.0, 5000, 1), Arrival(2.0, 100, 1)]
        load = from_trace(arrivals)
        assert load.rate == 1.0
        assert load.arrival_cv == 0.0
        assert load.mean_context == pytest.approx(100 + 1001 / 2)
        assert load.mean_context < load.input_len + load.output_len / 2

    def test_json_lines_and_csv_are_read(self, tmp_path: Path) -> None:
        mooncake = tmp_path / "m.jsonl"
        rows = [{"timestamp": 1000 * i, "input_length": 10 + i, "output_length": 5} for i in range(5)]
        mooncake.write_text("\n".join(json.dumps(r) for r in rows))
        azure = tmp_path / "a.csv"
        lines = [f"2023-11-16 18:17:0{i}.9799600,{10 + i},5" for i in range(5)]
        azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
        assert read_trace(mooncake) == read_trace(azure)
        assert from_trace(read_trace(azure)).rate == pytest.approx(1.0)

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ('{"timestamp": 0, "input_length": 0, "output_length": 5}', "line 1.*at least 1 token"),
            ('{"timestamp": 0, "output_length": 5}', "line 1.*input_length"),
            ("{", "line 1 is no JSON"),
            ("a,b\n1,2\n", "line 2.*timestamp"),
        ],
    )
    def test_a_bad_trace_names_its_line(self, tmp_path: Path, text: str, what: str) -> None:
        path = tmp_path / "t"
        path.write_text(text)
        with pytest.raises(StartError, match=what):
            read_trace(path)

    def test_a_trace_without_duration_has_no_rate(self) -> None:
        with pytest.raises(StartError, match="at one instant"):
            from_trace([Arrival(0.0, 5, 5)] * 3)


@pytest.mark.parametrize(
    ("values", "field"),
    [((0.0, 10, 10), "rate"), ((1.0, 0, 10), "input"), ((1.0, 10, 0), "output")],
)
def test_a_bad_load_names_its_flag(values: tuple[float, int, int], field: str) -> None:
    with pytest.raises(StartError, match=f"--{field}") as caught:
        Workload.of(*values)
    assert caught.value.param == field
