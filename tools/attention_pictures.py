"""Draws docs/pictures/attention-*.svg: a GPU's from kept results, a CPU's from the table of docs/attention.md.

It measures nothing; run it from anywhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from steelyard.perf.attention_cases import AttentionCase
from steelyard.perf.kernel_bench import Row
from steelyard.perf.kernel_report import chart, draw

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/h200-kernels.json"
STYLE = (
    "<style>text{font:11px system-ui,sans-serif}.t{font-weight:600}.g{stroke:#e5e5e5}</style>"
    '<rect width="100%" height="100%" fill="#fff"/>'
)
HEAD_DIM = 128


def row_of(values: dict[str, Any]) -> Row:
    """The row that `Row.to_dict` wrote."""
    values = {**values, "dtype": getattr(torch, values["dtype"])}
    case = AttentionCase(**{f.name: values[f.name] for f in fields(AttentionCase)})
    return Row(case, **{f.name: values[f.name] for f in fields(Row) if f.name != "case"})


def memory_on_a_cpu() -> dict[str, list[tuple[int, float]]]:
    """(length, MiB) of each attention: the rows of four cells under "the most memory" in docs/attention.md."""
    text = (ROOT / "docs/attention.md").read_text()
    found = text[text.index("Measured, with 8 query heads") : text.index("attention-memory-cpu.svg")]
    cells = [line.strip("|").split("|") for line in re.findall(r"^\|.*\|$", found, re.M)]
    names = ("naive", "sdpa-flash", "steelyard")
    rows = [[float(re.sub(r"[^\d.]", "", cell)) for cell in row] for row in cells[2:]]
    return {name: [(int(row[0]), row[1 + i]) for row in rows] for i, name in enumerate(names)}


def pictures() -> dict[str, str]:
    """By file name: speed and extra memory of the forward, speed of the gradient; causal, heads of 128."""
    rows = [row_of(values) for values in json.loads(RESULTS.read_text())["kernels"]["rows"]]
    rows = [r for r in rows if r.case.kind == "prefill" and r.case.causal and r.case.head_dim == HEAD_DIM]
    forward = [r for r in rows if r.direction == "forward"]
    backward = [r for r in rows if r.direction == "backward"]
    found = {
        "speed-h200": chart("forward, TFLOP/s", forward, lambda r: r.tflops),
        "memory-h200": chart("forward, extra memory, MiB", forward, lambda r: (r.extra_bytes or 0) / 2**20),
        "gradient-h200": chart("gradient, TFLOP/s", backward, lambda r: r.tflops),
        "memory-cpu": draw("forward, extra memory, MiB", memory_on_a_cpu()),
    }
    return {f"attention-{name}.svg": _alone(svg) for name, svg in found.items()}


def _alone(svg: str) -> str:
    """The same as a file of its own."""
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{STYLE}", 1) + "\n"


def main() -> None:
    for name, svg in pictures().items():
        (ROOT / "docs/pictures" / name).write_text(svg)


if __name__ == "__main__":
    main()
