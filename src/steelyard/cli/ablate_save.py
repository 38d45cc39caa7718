"""Writes an ablation to a directory: tables, figures, a page with bars, and every run's report. Not a command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steelyard.bench.ablate import Comparison
from steelyard.bench.ablate_text import SetResult, knobs_markdown, set_markdown
from steelyard.cli.ablate_page import page

Json = dict[str, Any]


def as_json(knobs: Sequence[Comparison], sets: Sequence[SetResult]) -> Json:
    """Everything but the runs' own reports."""
    tables = [table.as_json() | {"steps": [asdict(step) for step in table.steps]} for table in sets]
    return {"schema": "steelyard.ablation/1", "knobs": [asdict(c) for c in knobs], "sets": tables}


def save(
    folder: Path, knobs: Sequence[Comparison], sets: Sequence[SetResult], reports: Mapping[str, Json]
) -> list[Path]:
    """ablation.md, ablation.json, ablation.html and reports.jsonl; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(["# Ablation", "", *(set_markdown(s) for s in sets), knobs_markdown(knobs) if knobs else ""])
    written = {
        "ablation.md": text,
        "ablation.json": json.dumps(as_json(knobs, sets), indent=1) + "\n",
        "ablation.html": page(knobs, sets, reports),
        "reports.jsonl": "".join(json.dumps(report) + "\n" for report in reports.values()),
    }
    for name, content in written.items():
        (folder / name).write_text(content)
    return [folder / name for name in written]
