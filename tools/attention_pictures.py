"""Draws docs/pictures/attention-*-h200.svg from kept results. It measures nothing; run it from anywhere."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from steelyard.perf.attention_cases import AttentionCase
from steelyard.perf.kernel_bench import Row
from steelyard.perf.kernel_report import chart

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


def main() -> None:
    """Speed and extra memory of the forward, speed of the gradient; causal, heads of 128."""
    rows = [row_of(values) for values in json.loads(RESULTS.read_text())["kernels"]["rows"]]
    rows = [r for r in rows if r.case.kind == "prefill" and r.case.causal and r.case.head_dim == HEAD_DIM]
    forward = [r for r in rows if r.direction == "forward"]
    backward = [r for r in rows if r.direction == "backward"]
    pictures = {
        "speed": chart("forward, TFLOP/s", forward, lambda r: r.tflops),
        "memory": chart("forward, extra memory, MiB", forward, lambda r: (r.extra_bytes or 0) / 2**20),
        "gradient": chart("gradient, TFLOP/s", backward, lambda r: r.tflops),
    }
    for name, svg in pictures.items():
        svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{STYLE}", 1)
        (ROOT / f"docs/pictures/attention-{name}-h200.svg").write_text(svg + "\n")


if __name__ == "__main__":
    main()
