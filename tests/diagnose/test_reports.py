"""`steelyard diagnose report.json`: what of a saved run of ours is read, beside the figures of its client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.bench.gates import Gate, as_json, label_of
from steelyard.bench.scrape import Sample, ServerSide, parse
from steelyard.bench.summary import server_side
from steelyard.bench.windows import Window
from steelyard.cli.main import main
from steelyard.diagnose.sources import read_report
from steelyard.diagnose.verdict import diagnose
from steelyard.errors import InvalidRequest

FAILED = [
    Gate("failures", "fail", "3 of 90 requests failed", "INVALID"),
    Gate("warm-up", "pass", "8 requests before"),
    Gate("sent on time", "fail", "p99 of the delay 800 ms, limit 10 ms", "CLIENT-LIMITED"),
]


def write(path: Path, gates: list[Gate], server: ServerSide) -> Path:
    """A report as `bench serve` saves it, as far as a diagnosis reads."""
    stats = {"p50": 100.0, "p99": 300.0, "mean": 120.0}
    window = {
        "seconds": 10.0, "request_rate": 1.6, "mean_in_flight": 15.8, "input_tokens_per_s": 200.0,
        "input_computed_tokens_per_s": 200.0, "output_tokens_per_s": 50.0, "tpot_ms": stats, "icl_ms": stats,
        "latency_ms": {"service": {"ttft": stats, "e2e": stats}},
    }  # fmt: skip
    report: dict[str, Any] = {
        "schema": "steelyard.bench/1",
        "valid": not any(gate.outcome == "fail" for gate in gates),
        "label": label_of(gates),
        "gates": as_json(gates),
        "arrivals": {"rate": None, "max_concurrency": 16},
        "workload": {"mean_input_len": 128.0, "mean_output_len": 32.0},
        "server_facts": {"config": {"max_num_seqs": "8"}},
        "summary": {
            "windows": {"whole run": window},
            "server": server_side(server, (), Window("whole run", 0, 20 * 10**9)),
        },
    }
    path.write_text(json.dumps(report))
    return path


def side(has_accounts: bool = True) -> ServerSide:
    """Of a server of 8 rows whose sequences end in waves, with 16 clients."""
    readings = [Sample(i * 10**9, {"running": 4.0 if i % 4 == 0 else 8.0, "waiting": 8.0}) for i in range(20)]
    account = 'steelyard:request_time_seconds_total{{state="{}"}} {}\n'.format if has_accounts else "".format
    before = parse("x 1\n" + account("wait_slot", 10.0) + account("wait_kv", 1.0))
    after = parse("x 1\n" + account("wait_slot", 100.0) + account("wait_kv", 11.0))
    return ServerSide(readings, before, after)


def test_a_run_that_is_not_valid_says_so_first_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = write(tmp_path / "run.json", FAILED, side())
    assert main(["diagnose", str(saved)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("NOT VALID") and second.startswith("Binding: ")
    assert "INVALID, CLIENT-LIMITED: failures: 3 of 90 requests failed; sent on time: p99 of the delay 800 ms" in first
    assert "warm-up" not in first
    assert main(["diagnose", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["invalid"].startswith("INVALID, CLIENT-LIMITED: failures")
    assert diagnose(read_report(write(saved, FAILED[1:2], side()))).text().startswith("Binding: ")


@pytest.mark.parametrize("has_accounts", [True, False])
def test_a_saved_run_names_the_cap_though_rows_are_free_between_waves(has_accounts: bool, tmp_path: Path) -> None:
    seen = read_report(write(tmp_path / "run.json", [], side(has_accounts)))
    assert (seen.running, seen.at_cap, seen.waited_for_row) == (7.0, 0.75, 0.9 if has_accounts else None)
    assert diagnose(seen).verdict == "sequence cap (8)"


@pytest.mark.parametrize("summary", [{"windows": {}}, {"windows": {"whole run": []}}, [], None, {"windows": 5}])
def test_a_report_in_pieces_is_named(summary: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schema": "steelyard.bench/1", "summary": summary}))
    with pytest.raises(InvalidRequest, match=r"run\.json: lacks"):
        read_report(path)
