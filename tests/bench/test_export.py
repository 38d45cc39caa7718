"""How a report is written for a person."""

from __future__ import annotations

from typing import Any

from steelyard.bench.export import _said, compare_markdown, window_lines
from steelyard.cli.bench_page import page
from tests.bench.rig import FakeServer
from tests.bench.test_gates import report_of


def window(seconds: float, rate: float, mean: float) -> dict[str, Any]:
    stats = {"n": 9, "mean": mean, "p50": 1.0, "p95": 2.0, "p99": 3.0, "p99_quotable": False, "max": 4.0}
    return {"seconds": seconds, "ok": 9, "scheduled": 9, "tpot_ms": stats, "request_rate": rate, "mean_in_flight": 2.0}


def test_a_steady_part_shows_what_differs_from_the_whole_run_and_nothing_twice() -> None:
    same = window_lines({"whole run": window(9, 5.0, 1.5), "steady": window(9, 5.0, 1.5)})
    assert same[-3:] == [
        "## Steady: 9.0 s, 9 of 9 sent in it ok",
        "",
        "Every figure is the same as over the whole run.",
    ]
    other = window_lines({"whole run": window(9, 5.0, 1.5), "steady": window(7, 6.0, 1.5)})
    assert other[other.index("## Steady: 7.0 s, 9 of 9 sent in it ok") + 2 :] == [
        *("| rate | value |", "| --- | --- |", "| requests/s | 6 |", ""),
        "Latencies, attainment and goodput are of the 9 requests sent in this part; requests/s counts the 42 that "
        "ended in it, tokens/s the tokens that came in it.",
        "",
        "Every other figure is the same as over the whole run.",
    ]
    rows = [line for line in other if line.startswith(("| TPOT", "| requests/s"))]
    assert len(rows) == len(set(rows)) == 3


def test_the_page_has_the_windows_as_the_markdown_has_them() -> None:
    report = report_of(FakeServer(prefill_s=0.1, gap_s=0.03))
    windows = report["summary"]["windows"]
    windows["steady"] = windows["whole run"]
    shown = page([report])
    assert shown.count("<td>TPOT, by request (ms)</td>") == 1 and "<th>p95</th>" in shown
    assert shown.count("Every figure is the same as over the whole run.") == 1


def test_runs_that_should_do_the_same_work_are_told_apart_from_points_of_a_curve() -> None:
    reports = [report_of(FakeServer(prefill_s=0.1, gap_s=0.03)) for _ in range(2)]
    reports[1]["workload"] = {**reports[1]["workload"], "digest": "another"}
    assert "did different work" in compare_markdown(reports) and "did different work" in page(reports)
    assert "different work" not in compare_markdown(reports, points=True)
    assert "different work" not in page(reports, "Sweep", points=True)


def test_a_table_of_facts_is_written_as_words() -> None:
    assert _said({"block_size": "16", "device": "auto"}) == "block_size 16, device auto"
    assert _said("a command") == "a command"
    blank = {"batch_size": "", "seed": "0", "script": " ", "rate": None, "ramp_s": 0.0}
    assert _said(blank) == "seed 0, ramp_s 0.0", "what has no value is left out, and a zero is one"


def test_rates_are_figures_and_the_residual_a_share() -> None:
    shown = {**window(9, 15_812.4, 1.5), "little_residual": 8.249e-06}
    lines = window_lines({"whole run": shown})
    assert "| requests/s | 15,812 |" in lines and "| Little residual | 0.00% |" in lines
