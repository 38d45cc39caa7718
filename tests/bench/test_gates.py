"""The traps of measuring, each as a run that a naive report would have passed. Virtual time; exact server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steelyard.bench.arrivals import Arrivals, make_schedule
from steelyard.bench.clients import Sent
from steelyard.bench.gates import label_of
from steelyard.bench.record import ClientStats, RequestRecord, Slo, Usage
from steelyard.bench.scrape import Sample, ServerSide, parse, values_of
from steelyard.bench.session import RunOptions, Work, make_report
from steelyard.bench.text_prompts import as_text
from steelyard.bench.workload import PlannedRequest
from tests.bench.rig import FakeServer, plan, run_load

CLOSED = Arrivals(concurrency=4)


def report_of(
    server: FakeServer,
    requests: list[PlannedRequest] | None = None,
    arrivals: Arrivals = CLOSED,
    side: ServerSide | None = None,
    timeout_s: float = 600.0,
    **options: Any,
) -> dict[str, Any]:
    requests = requests if requests is not None else plan(600)
    schedule = make_schedule(arrivals, len(requests), 0)
    result = run_load(server, requests, arrivals, schedule, timeout_s)
    sent = Sent(result.records, result.in_flight, [ClientStats(cpu_s=0.1, wall_s=1.0, lag_ns=[1000])])
    work = Work(requests, schedule, arrivals)
    return make_report(sent, side or ServerSide(), work, RunOptions(**options), True)


def gate(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [g for g in report["gates"] if g["name"] == name]
    return found


def metrics(before: str, after: str) -> ServerSide:
    return ServerSide([], parse(before), parse(after))


def test_a_clean_run_is_valid_and_its_numbers_are_the_servers() -> None:
    report = report_of(FakeServer(prefill_s=0.2, gap_s=0.03))
    assert report["valid"], [g for g in report["gates"] if g["outcome"] == "fail"]
    whole = report["summary"]["windows"]["whole run"]
    assert whole["latency_ms"]["service"]["ttft"]["p99"] == pytest.approx(200)
    assert whole["tpot_ms"]["p50"] == pytest.approx(30) and whole["itl_ms"]["mean"] == pytest.approx(30)
    assert whole["latency_ms"]["service"]["e2e"]["p50"] == pytest.approx(320)
    steady = report["summary"]["windows"]["steady"]
    assert steady["mean_in_flight"] == pytest.approx(4, abs=0.1) and steady["little_residual"] < 0.05
    assert whole["output_tokens_per_s"] * whole["seconds"] == pytest.approx(600 * 5)


def test_coordinated_omission_is_seen_on_the_users_clock_and_named() -> None:
    arrivals = Arrivals("constant", rate=20.0, concurrency=2)
    report = report_of(FakeServer(prefill_s=0.2, gap_s=0.0), plan(200, output_len=1), arrivals)
    latency = report["summary"]["windows"]["whole run"]["latency_ms"]
    assert latency["service"]["e2e"]["p99"] == pytest.approx(200), "what a naive report says: all is well"
    assert latency["user"]["e2e"]["p99"] > 30_000
    assert report["label"] == "CLIENT-LIMITED" and gate(report, "rate achieved")["outcome"] == "fail"


def test_a_token_faster_than_the_weights_can_be_read_is_invalid() -> None:
    report = report_of(FakeServer(gap_s=0.003), plan(600, output_len=9), floor_tpot_ms=4.48)
    assert gate(report, "physical floor")["outcome"] == "fail" and report["label"] == "INVALID"
    ok = report_of(FakeServer(gap_s=0.005), plan(600, output_len=9), floor_tpot_ms=4.48)
    assert gate(ok, "physical floor")["outcome"] == "pass"


def test_prompts_that_grew_on_the_way_are_invalid() -> None:
    report = report_of(FakeServer(extra_prompt_tokens=1))
    assert gate(report, "prompt length")["outcome"] == "fail" and not report["valid"]


@pytest.mark.parametrize("share", [0.6, 1.4])
def test_ignore_eos_not_honoured_or_padding_is_invalid(share: float) -> None:
    report = report_of(FakeServer(honour_len=share))
    assert gate(report, "output length")["outcome"] == "fail"
    assert report["summary"]["wrong_length"] == 600


def test_hits_in_a_cold_run_are_invalid_and_declared_ones_are_not() -> None:
    report = report_of(FakeServer(cached_tokens=4))
    assert gate(report, "prefix cache")["outcome"] == "fail"
    shared = report_of(FakeServer(cached_tokens=4), plan(600, shared_len=4))
    assert gate(shared, "prefix cache")["outcome"] == "pass" and shared["workload"]["cache_state"] == "primed"
    unknown = report_of(FakeServer(cached_tokens=None))
    assert gate(unknown, "prefix cache")["outcome"] == "not checked"


def test_the_same_prompt_twice_is_invalid() -> None:
    requests = plan(300)
    again = [replace(r, id=r.id + 300) for r in requests]
    assert gate(report_of(FakeServer(), requests + again), "prefix cache")["outcome"] == "fail"


def test_declared_and_real_hit_rates_are_both_shown() -> None:
    report = report_of(FakeServer(cached_tokens=0), plan(600, shared_len=6))
    assert gate(report, "prefix cache")["outcome"] == "warn"
    assert "0.0% of prompt tokens" in gate(report, "prefix cache")["evidence"]
    assert "75.0% declared" in gate(report, "prefix cache")["evidence"]


def test_timeouts_stay_in_the_denominator_and_in_the_latencies() -> None:
    def fail(number: int) -> object:
        return None

    server = FakeServer(prefill_s=1.0, gap_s=0.0, num_slots=1, fail=fail)
    arrivals = Arrivals("constant", rate=1.0)
    report = report_of(server, plan(20, output_len=1), arrivals, timeout_s=8.0, slo=Slo(e2e_ms=5000))
    whole = report["summary"]["windows"]["whole run"]
    assert report["summary"]["failures"]["timeout"] > 0 and not report["valid"]
    assert whole["latency_ms"]["service"]["censored"] == report["summary"]["failures"]["timeout"]
    good = whole["ok"]
    assert whole["attainment"] < 1.0 and whole["attainment"] * 20 <= good


def test_attainment_is_of_all_scheduled_and_on_the_users_clock() -> None:
    server = FakeServer(prefill_s=0.1, gap_s=0.0, fail=lambda n: 503 if n % 4 == 0 else None)
    report = report_of(server, plan(40, output_len=1), slo=Slo(ttft_ms=150))
    whole = report["summary"]["windows"]["whole run"]
    assert whole["attainment"] == pytest.approx(0.75) and whole["attainment_lower"] < 0.75
    assert whole["goodput_requests_per_s"] == pytest.approx(30 / whole["seconds"])


def test_tokens_of_client_and_server_are_reconciled() -> None:
    name = "vllm:generation_tokens_total"
    good = report_of(FakeServer(), side=metrics(f"{name} 100", f"{name} 3100"))
    assert gate(good, "token reconciliation")["outcome"] == "pass"
    bad = report_of(FakeServer(), side=metrics(f"{name} 100", f"{name} 6200"))
    assert gate(bad, "token reconciliation")["outcome"] == "fail" and bad["label"] == "INVALID"


def test_a_metric_that_is_absent_or_renamed_is_not_zero() -> None:
    page = 'old:kv_usage{model="m"} 0.7\nvllm:num_requests_running{model="a"} 3\n'
    assert values_of(parse(page))["kv_usage"] is None and values_of(parse(page))["running"] == 3
    report = report_of(FakeServer(), side=metrics("x 1", "x 2"))
    assert "kv_usage" in report["summary"]["server"]["absent"]
    assert gate(report, "token reconciliation")["outcome"] == "not checked"
    restarted = metrics("vllm:num_preemptions_total 9", "vllm:num_preemptions_total 2")
    assert restarted.delta("preemptions") is None


def test_gauges_are_taken_over_the_runs_own_window() -> None:
    side = metrics("vllm:num_requests_running 0", "vllm:num_requests_running 0")
    side.samples = [Sample(t, {"running": v}) for t, v in ((-(10**9), 100.0), (10**9, 4.0), (2 * 10**9, 2.0))]
    report = report_of(FakeServer(), side=side)
    assert report["summary"]["server"]["running"] == {"mean": 3.0, "max": 4.0, "n": 2}


def test_opening_wave_is_reported_apart() -> None:
    report = report_of(FakeServer(num_slots=1, prefill_s=1.0, gap_s=0.0), plan(40, output_len=1))
    assert report["summary"]["opening_wave"]["ttft_ms"]["n"] == 4
    assert report["summary"]["opening_wave"]["others_ttft_ms"]["n"] == 36


def test_the_drain_is_outside_the_steady_window() -> None:
    requests = [replace(r, output_len=2000 if r.id == 399 else 5) for r in plan(400)]
    windows = report_of(FakeServer(prefill_s=0.1), requests)["summary"]["windows"]
    assert windows["steady"]["seconds"] < 0.95 * windows["whole run"]["seconds"]
    assert windows["steady"]["mean_in_flight"] > windows["whole run"]["mean_in_flight"]


def test_p99_of_a_hundred_is_marked() -> None:
    report = report_of(FakeServer(), plan(100))
    assert gate(report, "sample size")["outcome"] == "warn"
    assert not report["summary"]["windows"]["whole run"]["tpot_ms"]["p99_quotable"]


def test_multi_token_events_are_shown_and_do_not_change_tpot() -> None:
    report = report_of(FakeServer(gap_s=0.01, per_event=4), plan(600, output_len=9))
    whole = report["summary"]["windows"]["whole run"]
    assert whole["tokens_per_event"] == pytest.approx(3) and gate(report, "chunk is not token")["outcome"] == "warn"
    assert whole["icl_ms"]["p50"] > 2 * whole["tpot_ms"]["p50"]


def test_no_usage_is_no_count_rather_than_a_count_of_chunks() -> None:
    report = report_of(FakeServer(usage=False, per_event=2))
    assert gate(report, "server counts")["outcome"] == "warn"
    assert gate(report, "output length")["outcome"] == "not checked"
    assert report["summary"]["windows"]["whole run"]["tpot_ms"] is None


def test_burstiness_does_not_move_the_offered_rate() -> None:
    for k in (0.2, 4.0):
        report = report_of(FakeServer(), plan(600), Arrivals("gamma", rate=50.0, burstiness=k))
        assert gate(report, "schedule")["outcome"] == "pass" and gate(report, "rate achieved")["outcome"] == "pass"


def test_a_load_above_capacity_is_said_to_be_growing() -> None:
    slow = FakeServer(prefill_s=0.2, gap_s=0.0, num_slots=1)
    report = report_of(slow, plan(200, output_len=1), Arrivals("constant", 10))
    assert gate(report, "stationary")["outcome"] == "warn"


def test_a_busy_client_a_late_loop_and_a_stepped_clock_are_seen() -> None:
    requests = plan(600)
    schedule = make_schedule(CLOSED, 600, 0)
    result = run_load(FakeServer(), requests, CLOSED, schedule)
    stats = ClientStats(cpu_s=0.99, wall_s=1.0, lag_ns=[50_000_000] * 9, wall_step_ns=10**9)
    sent = Sent(result.records, result.in_flight, [stats])
    report = make_report(sent, ServerSide(), Work(requests, schedule, CLOSED), RunOptions(), None)
    assert report["label"] == "CLIENT-LIMITED"
    assert gate(report, "clocks")["outcome"] == "warn" and gate(report, "warm-up")["outcome"] == "not checked"


def test_a_lost_record_breaks_littles_law() -> None:
    requests, schedule = plan(600), make_schedule(CLOSED, 600, 0)
    result = run_load(FakeServer(), requests, CLOSED, schedule)
    lost: list[RequestRecord] = [r for r in result.records if r.id % 6]
    sent = Sent(lost, result.in_flight, [ClientStats(0.1, 1.0)])
    report = make_report(sent, ServerSide(), Work(requests, schedule, CLOSED), RunOptions(), True)
    assert gate(report, "Little's law")["outcome"] == "fail"


def test_labels_are_ordered_and_only_of_failures() -> None:
    report = report_of(FakeServer(extra_prompt_tokens=1), plan(50), Arrivals("constant", rate=1000.0, concurrency=1))
    assert report["label"] == "INVALID, CLIENT-LIMITED"
    assert label_of([]) == "valid"


def test_mean_of_tpots_and_token_weighted_tpot_are_told_apart() -> None:
    requests = [replace(r, output_len=2 if r.id % 2 else 20) for r in plan(600)]
    whole = report_of(FakeServer(), requests)["summary"]["windows"]["whole run"]
    assert whole["tpot_ms"]["n"] == 600 and whole["tpot_token_weighted_ms"] == pytest.approx(10)


def test_cached_and_computed_input_are_apart() -> None:
    whole = report_of(FakeServer(cached_tokens=6), plan(600, shared_len=6))["summary"]["windows"]["whole run"]
    assert whole["input_cached_tokens_per_s"] == pytest.approx(0.75 * whole["input_tokens_per_s"])
    assert Usage(cached_tokens=None).cached_tokens is None


@pytest.mark.parametrize(
    ("page", "outcome"),
    [
        ('steelyard:config_info{check_invariants="True",dtype="bfloat16"} 1', "fail"),
        ('steelyard:config_info{check_invariants="False",dtype="bfloat16"} 1', "pass"),
        ("vllm:num_requests_running 0", "not checked"),
    ],
)
def test_a_server_that_watches_itself_is_not_compared_with_one_that_does_not(page: str, outcome: str) -> None:
    report = report_of(FakeServer(), side=metrics(page, page))
    assert gate(report, "instruments")["outcome"] == outcome
    assert report["valid"] == (outcome != "fail")


def test_a_client_that_counts_with_another_tokenizer_is_caught_by_the_servers_own_count() -> None:
    """The client counts words, the server characters: the client's own count finds every prompt exact."""

    def words(text: str) -> int:
        return len(text.split())

    requests = as_text(plan(100), words, 0, "n")
    assert all(r.text is not None and words(r.text) == len(r.prompt_ids) for r in requests)
    report = report_of(FakeServer(), requests)
    assert not report["valid"] and gate(report, "prompt length")["outcome"] == "fail"
