"""`steelyard bench throughput` and `latency` on a tiny model: what they print and write is of what they ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.cli import ticker
from steelyard.cli.main import main
from steelyard.perf import workloads
from steelyard.plan.records import read_records
from tests import tiny_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small = {
        "models": {},
        "offline": [{"name": "four", "requests": 4, "input": [3, 9], "output": 5}],
        "single": [{"name": "one", "input": 20, "output": 4}],
    }
    (tmp_path / "workloads.json").write_text(json.dumps(small))
    monkeypatch.setattr(workloads, "FILE", tmp_path / "workloads.json")
    return tiny_model.write(tmp_path / "tiny")


def test_throughput_counts_every_token_and_keeps_every_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, steps = tmp_path / "out.json", tmp_path / "steps.jsonl"
    flags = ["--device", "cpu", "--runs", "2", "--json", str(report), "--steps", str(steps)]
    assert main(["bench", "throughput", str(folder), *flags]) == 0
    assert "four" in capsys.readouterr().out
    [row] = json.loads(report.read_text())["rows"]
    assert row["output_tokens"] == 20 and row["steps"] >= 5 and len(row["all_seconds"]) == 2
    assert row["out_tok_s"] == pytest.approx(20 / row["seconds"])
    assert len(read_records(steps)) == 2 * row["steps"]


def test_latency_gives_first_and_later_tokens_and_a_curve(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ticker, "ELSEWHERE_S", 0.0)
    report = tmp_path / "out.json"
    flags = ["--device", "cpu", "--batch", "1..3", "--input", "8", "--output", "6", "--json", str(report)]
    assert main(["bench", "latency", str(folder), *flags]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert rows[0]["case"] == "one" and 0 < rows[0]["ttft_ms"] < rows[0]["seconds"] * 1e3
    assert [r["batch"] for r in rows[1:]] == [1, 2, 3] and all(r["step_ms"] > 0 for r in rows[1:])
    said = capsys.readouterr().err
    assert "one: 0/1 done, 1 tokens" in said and "batch 3 8/6: 3/3 done, 18 tokens" in said


def test_a_workload_that_does_not_fit_is_refused_before_it_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--device", "cpu", "--max-model-len", "16"]
    assert main(["bench", "latency", str(folder), *flags]) == 2
    assert "needs 24 tokens" in capsys.readouterr().err
