"""Step records are read exactly, and a bad one names its line and field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.errors import StartError
from steelyard.plan.costs import Chunk
from steelyard.plan.records import StepRecord, read_records


def test_records_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    rows = [
        {"device_ns": 4_000_000, "chunks": [[1, 300, 7], [256, 512, 1, 0]], "workload": "w"},
        {"device_ns": 5_000_000, "decode_rows": 3, "context_sum": 1000},
        {"device_ns": 6_000_000, "prefill_tokens": 513, "prefill_rows": 2, "prefill_context_sum": 1000},
    ]
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    first, second, third = read_records(path)
    assert first == StepRecord((Chunk(1, 300, 7), Chunk(256, 512, 1, 0)), 0.004, "w")
    assert sum(c.context_len * c.count for c in second.chunks) == 1000
    assert sum(c.num_new * c.count for c in third.chunks) == 513


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"decode_rows": 1, "context_sum": 5}', "device_ns"),
        ('{"device_ns": 5}', "without work"),
        ('{"device_ns": 5, "decode_rows": 4, "context_sum": 3}', "context_sum"),
        ('{"device_ns": 5, "chunks": [[5, 3]]}', "chunks"),
        ("[1]", "no JSON object"),
        ("{", "line 2 is no JSON"),
    ],
)
def test_a_bad_record_names_its_line_and_field(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"device_ns": 5, "decode_rows": 1, "context_sum": 5}\n' + line)
    with pytest.raises(StartError, match=f"line 2.*{field}|{field}"):
        read_records(path)


def test_prompts_that_did_not_end_sample_nothing(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    row = {"device_ns": 1, "prefill_tokens": 513, "prefill_rows": 4, "prefill_context_sum": 900, "prefill_sampled": 3}
    path.write_text(json.dumps(row))
    (record,) = read_records(path)
    assert sum(c.num_sampled * c.count for c in record.chunks) == 3
    assert sum(c.count for c in record.chunks) == 4
    assert sum(c.num_new * c.count for c in record.chunks) == 513
