"""Writes measured runs to a directory: raw records, report in four forms, vLLM's JSON. Not a command of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from steelyard.bench.export import to_csv, to_markdown, vllm_json
from steelyard.bench.record import write_records
from steelyard.bench.session import RunResult
from steelyard.cli.bench_page import page


def save(directory: Path, results: Sequence[RunResult]) -> list[Path]:
    """The files written. Runs are named by their names, or numbered."""
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for number, result in enumerate(results):
        stem = re.sub(r"[^\w.-]+", "-", result.report["name"]) or f"run-{number}"
        records = directory / f"{stem}.records.jsonl"
        write_records(records, result.records)
        texts = {
            f"{stem}.json": json.dumps(result.report, indent=1),
            f"{stem}.vllm.json": json.dumps(vllm_json(result.report, result.records)),
            f"{stem}.md": to_markdown(result.report),
            f"{stem}.html": page([result.report]),
        }
        for name, text in texts.items():
            (directory / name).write_text(text)
        written += [records, *(directory / name for name in texts)]
    table = directory / "runs.csv"
    table.write_text(to_csv([r.report for r in results]))
    return [*written, table]
