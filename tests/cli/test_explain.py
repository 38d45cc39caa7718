"""`steelyard explain`: timelines sum to their line, sentences carry the numbers, mistakes are said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli.explain import bar, duration, explain, sentence, timeline
from steelyard.cli.main import main

RECORD: dict[str, Any] = {
    "id": "cmpl-1",
    "endpoint": "/v1/completions",
    "outcome": "length",
    "total_ns": 1_000_000_000,
    "ttft_ns": 530_000_000,
    "buckets_ns": {"tokenize": 10_000_000, "wait_kv": 412_000_000, "prefill": 100_000_000, "decode": 478_000_000},
    "cost_ns": 50_000_000,
    "tokens": {"prompt": 100, "cached": 16, "generated": 20, "computed": 103, "recomputed": 0, "overshoot": 0},
    "choices": [
        {
            "index": 0,
            "engine": {
                "slowest_steps": [
                    {
                        "device_ns": 38_000_000,
                        "gaps_ns": {"cpu_late": 2_000_000},
                        "causes": {
                            "own_ns": 4_000_000,
                            "others_prefill_ns": 31_000_000,
                            "others_decode_ns": 2_000_000,
                            "padding_ns": 0,
                            "overhead_ns": 0,
                            "residual_ns": 1_000_000,
                            "others_prefill_tokens": 2048,
                            "others_decode_rows": 6,
                        },
                    }
                ]
            },
        }
    ],
}


def test_a_request_is_told_with_its_numbers() -> None:
    text = explain(RECORD)
    assert "waited 412.0 ms for KV blocks; its first token came after 530.0 ms" in text
    assert "of its slowest step's 38.0 ms, 4.0 ms were its own work, 31.0 ms others' prompts (2,048 tokens)" in text
    assert "1.0 ms are not explained; the device had waited 2.0 ms" in text
    for name, share in (("wait_kv", "41.2%"), ("decode", "47.8%")):
        assert any(name in line and share in line for line in text.splitlines())


def test_others_are_one_number_to_a_tenant() -> None:
    step = RECORD["choices"][0]["engine"]["slowest_steps"][0]
    causes = {"own_ns": 1, "padding_ns": 0, "overhead_ns": 0, "residual_ns": 0, "others_ns": 5_000_000}
    mine = {**RECORD, "choices": [{"index": 0, "engine": {"slowest_steps": [{**step, "causes": causes}]}}]}
    assert "5.0 ms others'," in explain(mine)


def test_the_line_is_divided_as_the_accounts_are() -> None:
    line = bar(RECORD["buckets_ns"], RECORD["total_ns"])
    assert len(line) == 72
    assert [line.count(mark) for mark in "e.#"] == [1, 29, 42]
    assert bar({}, 0) == " " * 72
    assert sentence({**RECORD, "buckets_ns": {"decode": 5}}).startswith("It waited for nothing")


def test_rows_over_steps() -> None:
    def share(row: int, request: str, kind: str) -> dict[str, Any]:
        return {"row": row, "request": request, "index": 0, "kind": kind}

    steps = [
        {"span_ns": 10, "device_ns": 5, "shares": [share(0, "x", "prefill")]},
        {"span_ns": 10, "device_ns": 10, "shares": [share(0, "x", "decode"), share(1, "y", "recompute")]},
    ]
    lines = timeline(steps).splitlines()
    assert lines[:2] == ["row    0 Pa", "row    1 .R"]
    assert "device busy 75%, rows filled 75%" in lines[2]
    assert timeline([]) == "no step yet"


def test_a_log_is_explained_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("\n".join(json.dumps({**RECORD, "id": f"r{i}", "total_ns": i * 10**6}) for i in (5, 9, 7)))
    assert main(["explain", str(path), "--slowest", "2"]) == 0
    heads = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "/v1/completions" in line]
    assert heads == ["r9", "r7"]


@pytest.mark.parametrize(("content", "said"), [("", "no request"), ("{}\n", "line 1"), ("nonsense", "line 1")])
def test_a_bad_log_is_said_in_one_line(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(content)
    assert main(["explain", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cmpl-1", "--url", "http://127.0.0.1:9"]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize(("ns", "text"), [(412_000_000, "412.0 ms"), (1_530_000_000, "1.53 s"), (-87_000, "-87 us")])
def test_durations(ns: int, text: str) -> None:
    assert duration(ns) == text
