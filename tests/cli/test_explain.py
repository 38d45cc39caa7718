"""`steelyard explain`: timelines sum to their line, sentences carry the numbers, mistakes are said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from steelyard.cli.durations import duration, size
from steelyard.cli.explain import _parts, bar, explain, sentence
from steelyard.cli.main import main
from steelyard.cli.timeline import picture, timeline
from steelyard.server.routes.ledger import MAX_LAST

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
                "kv_held": {"num_requests": 14, "blocks": [400], "bytes": 2_040_109_466},
                "slowest_steps": [
                    {
                        "kind": "decode",
                        "span_ns": 40_000_000,
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
                            "others_prefill_rows": 1,
                        },
                    }
                ],
            },
        }
    ],
}


SLOWEST: dict[str, Any] = RECORD["choices"][0]["engine"]["slowest_steps"][0]


def slow(**causes: int) -> dict[str, Any]:
    """The request with other causes of its slowest step."""
    engine = RECORD["choices"][0]["engine"]
    changed = {**SLOWEST, "causes": {**SLOWEST["causes"], **causes}}
    return {**RECORD, "choices": [{"index": 0, "engine": {**engine, "slowest_steps": [changed]}}]}


def test_a_request_is_told_with_its_numbers() -> None:
    text = explain(RECORD)
    assert "waited 412.0 ms for KV blocks (14 requests held 1.9 GiB); its first token came after 530.0 ms" in text
    assert (
        "of its slowest token's 40.0 ms, 31.0 ms were another request's prefill chunk of 2,048 tokens, 4.0 ms its own "
        "work, 2.0 ms the device waiting before it, 2.0 ms the decodes of 6 other requests, 1.0 ms not explained."
    ) in text
    for name, share in (("wait_kv", "41.2%"), ("decode", "47.8%")):
        assert any(name in line and share in line for line in text.splitlines())


def test_parts_of_a_step_shorter_than_expected_shrink_alike_to_the_step() -> None:
    text = explain(slow(own_ns=37_000_000, others_prefill_rows=3, residual_ns=-32_000_000))
    assert (
        "40.0 ms, 20.1 ms were its own work, 16.8 ms prefill chunks of 3 other requests (2,048 tokens), 2.0 ms" in text
    )
    assert "; by the rates of other steps such work takes 32.0 ms longer." in text
    assert "not explained" not in text


@pytest.mark.parametrize("residual_ns", [-738_500_000, -1, 0, 5])
def test_no_part_is_larger_than_the_whole(residual_ns: int) -> None:
    amounts_ns = {"own_ns": 5_500_000, "others_prefill_ns": 771_000_000 - residual_ns, "others_decode_ns": 0}
    step = {
        **SLOWEST,
        "device_ns": 776_500_000,
        "causes": {**SLOWEST["causes"], **amounts_ns, "residual_ns": residual_ns},
    }
    parts = [ns for ns, _ in _parts(step)]
    assert all(0 <= ns <= step["device_ns"] for ns in parts)
    assert 0 <= step["device_ns"] + sum(step["gaps_ns"].values()) - sum(parts) < 5  # each is rounded down


def test_before_there_are_rates_nothing_is_told_apart_and_that_is_said() -> None:
    text = explain(slow(own_ns=0, others_prefill_ns=0, others_decode_ns=0, residual_ns=38_000_000))
    assert "40.0 ms, 38.0 ms were not told apart yet: fewer than 64 steps had run, 2.0 ms the device waiting" in text


def test_others_are_one_number_to_a_tenant_and_holders_are_not_told() -> None:
    causes = {"own_ns": 1, "padding_ns": 0, "overhead_ns": 0, "residual_ns": 0, "others_ns": 5_000_000}
    engine = {"kv_held": None, "slowest_steps": [{**SLOWEST, "causes": causes}]}
    mine = explain({**RECORD, "choices": [{"index": 0, "engine": engine}]})
    assert "5.0 ms were other requests' work," in mine
    assert "for KV blocks; its first token" in mine


def test_the_line_is_divided_as_the_accounts_are() -> None:
    line = bar(RECORD["buckets_ns"], RECORD["total_ns"])
    assert len(line) == 72
    assert [line.count(mark) for mark in "e.#"] == [1, 29, 42]
    assert bar({}, 0) == " " * 72
    assert sentence({**RECORD, "buckets_ns": {"decode": 5}}).startswith("It waited for nothing")


def share(row: int, request: str, kind: str) -> dict[str, Any]:
    return {"row": row, "request": request, "index": 0, "kind": kind, "tokens": 3}


STEPS = [
    {"span_ns": 10, "device_ns": 5, "commit_ns": 110, "shares": [share(0, "x<", "prefill")]},
    {
        "span_ns": 10,
        "device_ns": 10,
        "commit_ns": 120,
        "shares": [share(0, "x<", "decode"), share(1, "y", "recompute")],
    },
]


def test_rows_over_steps() -> None:
    lines = timeline(STEPS).splitlines()
    assert lines[:2] == ["row    0 Pa", "row    1 .R"]
    assert "device busy 75%, rows filled 75%" in lines[2]
    assert timeline([]) == "no step yet"


def test_the_picture_is_to_scale_and_marks_what_was_computed_again() -> None:
    root = ElementTree.fromstring(picture(STEPS))
    boxes = [e.attrib for e in root.iter("{http://www.w3.org/2000/svg}rect") if "x" in e.attrib]
    first, second, third, again = boxes
    assert float(second["width"]) / float(first["width"]) == pytest.approx(2, rel=0.01)
    assert float(first["x"]) + float(first["width"]) + 0.2 == pytest.approx(float(second["x"]), abs=0.1)
    assert second["x"] == third["x"] and second["y"] != third["y"] and again["fill"] == "url(#again)"
    assert first["fill"].split()[0] == second["fill"].split()[0] != third["fill"].split()[0]
    assert ElementTree.fromstring(picture([])) is not None


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


@pytest.mark.parametrize("flag", ["--slowest", "--last"])
@pytest.mark.parametrize("value", ["0", "-2", "1001"])
def test_a_count_out_of_range_names_its_flag(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", flag, value]) == 2
    assert f"{flag}: must be a whole number between 1 and {MAX_LAST}, got {value}" in capsys.readouterr().err


def test_a_picture_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cmpl-1", "--svg", str(tmp_path / "x.svg")]) == 2
    assert "--timeline" in capsys.readouterr().err


@pytest.mark.parametrize(("ns", "text"), [(412_000_000, "412.0 ms"), (1_530_000_000, "1.53 s"), (-87_000, "-87 us")])
def test_durations(ns: int, text: str) -> None:
    assert duration(ns) == text


def test_sizes() -> None:
    assert [size(n) for n in (512, 2048, 34 * 2**20, 2_040_109_466)] == ["512 bytes", "2.0 KiB", "34.0 MiB", "1.9 GiB"]
