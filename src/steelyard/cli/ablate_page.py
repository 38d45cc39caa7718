"""An ablation as one HTML page, complete in itself: bars of every arm, attribution of every difference, tables."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from steelyard.bench.ablate import Comparison
from steelyard.bench.ablate_text import SetResult, knobs_markdown, quality_lines, set_markdown
from steelyard.cli.bars_svg import bars, signed_bars
from steelyard.cli.bench_page import STYLE, blocks_of

Json = dict[str, Any]
_FIGURES = {
    "output tok/s": "tok/s",
    "prefill: TTFT p50, ms": "ms",
    "decode: TPOT p50, ms": "ms",
}


def page(knobs: Sequence[Comparison], sets: Sequence[SetResult], reports: Mapping[str, Json]) -> str:
    """The page. `reports`: every run's, for the machine it ran on."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Ablation</title><style>{STYLE}</style></head><body><h1>Ablation</h1>",
        _where(list(reports.values()), [*knobs, *(step for result in sets for step in result.steps)]),
    ]
    for result in sets:
        parts.append(f"<h2>{html.escape(result.arms.name)}</h2>")
        parts += [*_set_bars(result), _quality(result)]
        parts += [_attribution(step) for step in result.steps]
        parts.append(f"<details><summary>Tables</summary>{blocks_of(set_markdown(result, quality=False))}</details>")
    for c in knobs:
        parts += [f"<h2>{html.escape(c.title)}</h2>", *_knob_bars(c), _quality(c), _attribution(c)]
    if knobs:
        parts.append(f"<details><summary>Tables</summary>{blocks_of(knobs_markdown(knobs, quality=False))}</details>")
    return "\n".join([*parts, "</body></html>"])


def _where(reports: Sequence[Json], found: Sequence[Comparison]) -> str:
    """How many runs were valid, how many changes are decided, and the machine. Good news only where one is."""
    good = sum(bool(r["valid"]) for r in reports)
    machine = reports[0].get("environment", {}) if reports else {}
    gpus = ", ".join(g.get("name", "") for g in machine.get("gpus", [])) or "no GPU: a CPU's figures are a CPU's"
    num_decided = sum(c.decides for c in found)
    text = f"{good} of {len(reports)} runs valid; of {len(found)} changes, {num_decided or 'none'} decided. "
    text += f"{machine.get('cpu', '')}; {gpus}"
    load = machine.get("load_average")
    if load:
        text += f"; load average {load[0]:.1f} when the first run began, this tool's own processes among it"
    css = "pass" if good == len(reports) and num_decided else "warn"
    return f'<p class="verdict {css}">{html.escape(text)}</p>'


def _set_bars(result: SetResult) -> list[str]:
    found = []
    data = result.as_json()["arms"]
    for title, unit in _FIGURES.items():
        rows = [(a["arm"], _mean(a["figures"][title]), f"s{i}") for i, a in enumerate(data)]
        found.append(_figure(bars(rows, title, unit), title))
    for group, by_arm in result.groups().items():
        for word, said in (("ttft_ms", "TTFT p50"), ("tpot_ms", "TPOT p50")):
            rows = [(name, _mean(values[word]), f"s{i}") for i, (name, values) in enumerate(by_arm.items())]
            found.append(_figure(bars(rows, f"{group}: {said}", "ms"), f"{group}: {said}, ms"))
    return found


def _knob_bars(c: Comparison) -> list[str]:
    found = []
    for title in ("output tokens/s", "TTFT p50, ms", "TPOT p50, ms"):
        if title in c.values:
            a, b = (fmean(v) for v in c.values[title])
            found.append(_figure(bars([("A", a, "s0"), ("B", b, "s1")], title, ""), title))
    return found


def _quality(of: Comparison | SetResult) -> str:
    return blocks_of("\n".join(quality_lines(of)))


def _attribution(c: Comparison) -> str:
    if not c.attribution:
        return "<p>No attribution: the server keeps no ledger.</p>"
    rows = [*c.attribution.items(), ("residual, in no account", c.residual_ms or 0.0)]
    svg = signed_bars(rows, f"{c.knob}: milliseconds a request by account", "ms")
    said = f"{c.knob}: where a request's time went, B less A, mean over requests"
    if c.void:
        said += f". Not to be quoted as it is: {'; '.join(c.void)}"
    return _figure(svg, said)


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return fmean(known) if known else 0.0
