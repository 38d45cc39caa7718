"""The report page: every plot it promises, several runs in one, complete in itself; saved runs joined by a command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from steelyard.bench.scrape import Sample, ServerSide, parse, values_of
from steelyard.cli.bench_page import page
from steelyard.cli.main import main
from tests.bench.rig import FakeServer
from tests.bench.test_gates import report_of

BEFORE = """vllm:generation_tokens_total 0
steelyard:steps_total 0
steelyard:step_device_seconds_total 0
vllm:e2e_request_latency_seconds_count 0
"""
AFTER = """vllm:generation_tokens_total 3000
vllm:kv_cache_usage_perc 0.5
vllm:num_requests_running 4
vllm:num_requests_waiting 1
steelyard:steps_total 1000
steelyard:step_device_seconds_total 20
vllm:e2e_request_latency_seconds_count 600
steelyard:request_time_seconds_total{state="prefill"} 60
steelyard:request_time_seconds_total{state="decode"} 120
"""


def run(name: str, **server: Any) -> dict[str, Any]:
    now = values_of(parse(AFTER))
    side = ServerSide([Sample(t * 10**9, now) for t in range(1, 40)], parse(BEFORE), parse(AFTER))
    return report_of(FakeServer(prefill_s=0.1, **server), side=side, name=name, floor_tpot_ms=5.0)


def test_a_page_has_every_plot_and_asks_no_host() -> None:
    shown = page([run("ours", gap_s=0.03), run("theirs", gap_s=0.06)])
    captions = re.findall(r'aria-label="([^"]*)"', shown)
    for plot in (
        "TTFT from schedule, ms", "TPOT, ms", "gap between events, ms", "requests in flight", "running", "waiting",
        "share of KV blocks in use", "TPOT p50, ms", "TTFT p50 from schedule, ms", "step time against floor",
        "time by account",
    ):  # fmt: skip
        assert plot in captions, plot
    assert "src=" not in shown and "href=" not in shown and "url(" not in shown and "<script" not in shown
    assert 'name="viewport"' in shown and "@media print" in shown and "prefers-color-scheme" in shown
    assert shown.count("floor: weights over bandwidth") == 2 and "ours" in shown and "theirs" in shown


def test_bars_show_the_figures_of_the_report() -> None:
    shown = page([run("ours", gap_s=0.03)])
    assert "share of KV blocks in use</td><td>mean 0.5, max 0.5" in shown
    assert "device time of a step, mean" in shown and ">20 ms<" in shown and ">30 ms<" in shown and ">5 ms<" in shown
    assert "prefill (compute)" in shown and ">100 ms<" in shown and ">200 ms<" in shown


def test_saved_runs_are_joined_and_other_files_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("one", "two"):
        paths.append(str(tmp_path / f"{name}.json"))
        Path(paths[-1]).write_text(json.dumps(run(name)))
    out = tmp_path / "all.html"
    assert main(["bench", "report", *paths, "--out", str(out), "--title", "Both"]) == 0
    assert "<title>Both</title>" in out.read_text()
    assert "one" in out.with_suffix(".md").read_text() and out.with_suffix(".csv").read_text().count("\n") >= 3
    (tmp_path / "other.json").write_text("{}")
    assert main(["bench", "report", str(tmp_path / "other.json"), "--out", str(out)]) == 2
    assert "other.json" in capsys.readouterr().err
