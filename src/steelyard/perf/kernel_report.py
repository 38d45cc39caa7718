"""A kernel bench's report as a text table, JSON, and one HTML file with its pictures inside. It measures nothing."""

from __future__ import annotations

import html
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from steelyard.perf.kernel_bench import Report, Row

COLORS = ("#1b6ca8", "#c8553d", "#4f772d", "#7b4ea3", "#b8860b", "#2a9d8f", "#8d5524", "#555555")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 560, 290, 66, 48, 30, 124  # RIGHT holds the names of the lines
HEADER = f"{'attention':<16} {'ms':>10} {'rate':>14} {'share':>6} {'extra':>10} {'speed':>7} {'memory':>8}"


def row_line(row: Row) -> str:
    """One row of the table, without its case. The rate is arithmetic for a prefill, bytes for a decode."""
    if row.ms is None or row.share is None:
        return f"{row.backend:<16} {row.note}"
    rate = per_second(row.tb_per_s, "B/s") if row.case.kind == "decode" else per_second(row.tflops, "FLOP/s")
    return (
        f"{row.backend:<16} {row.ms:>10.3f} {rate:>14} {row.share:>6.0%} {size(row.extra_bytes or 0):>10} "
        f"{times(row.speedup):>7} {times(row.memory_saving):>8}"
    )


def case_line(row: Row) -> str:
    """What stands above a case's rows: its shapes and the bytes that arithmetic gives it."""
    case = row.case
    moved = f"naive {size(case.naive_bytes)}, tiled {size(case.tiled_bytes)}, at least {size(case.least_bytes)}"
    return f"\n{case}, {row.direction}; forward moves: {moved}\n{HEADER}"


def text_table(report: Report) -> str:
    """The whole report for a terminal. `speed` and `memory` are against naive; `share` is of the ceiling."""
    lines, above = [ceiling_line(report)], ""
    for row in report.rows:
        if case_line(row) != above:
            above = case_line(row)
            lines.append(above)
        lines.append(row_line(row))
    return "\n".join(lines)


def ceiling_line(report: Report) -> str:
    c = report.ceiling
    return (
        f"ceilings of this run ({report.device}, {c.dtype}): matrix product {c.matmul_flops / 1e12:.3g} TFLOP/s, "
        f"reading {c.read_bandwidth / 1e12:.3g} TB/s, copying {c.copy_bandwidth / 1e12:.3g} TB/s"
    )


def to_json(report: Report) -> str:
    """Environment, ceilings and rows."""
    values = {
        "kind": "steelyard-bench-kernels",
        "version": 1,
        "environment": report.environment,
        "device": report.device,
        "ceiling": asdict(report.ceiling),
        "rows": [row.to_dict() for row in report.rows],
    }
    return json.dumps(values, indent=1) + "\n"


def to_html(report: Report) -> str:
    """One page without outside resources: rate, extra memory and traffic by length, for each shape; then the table."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in report.rows:
        mask = "causal" if row.case.causal else "full"
        heads = f"{row.case.num_heads}/{row.case.num_kv_heads} heads of {row.case.head_dim}"
        kind = f"decode of {row.case.batch}" if row.case.kind == "decode" else "prefill"
        groups[f"{kind}, {row.direction}, {mask}, {heads}"].append(row)
    parts = []
    for title, rows in groups.items():
        charts = [
            chart("TFLOP/s", rows, lambda r: r.tflops),
            chart("extra memory, MiB", rows, lambda r: r.extra_bytes / 2**20 if r.extra_bytes else None),
            chart("milliseconds", rows, lambda r: r.ms),
        ]
        if rows[0].case.kind == "decode":
            charts[0] = chart("TB/s of KV and operands", rows, lambda r: r.tb_per_s)
        parts.append(f"<h2>{html.escape(title)}</h2><div class=row>{''.join(charts)}</div>")
    gpu = report.environment.get("gpu") or {}
    machine = gpu.get("name") or report.environment["cpu"]
    return PAGE.format(
        machine=html.escape(str(machine)),
        torch=html.escape(str(report.environment["torch"])),
        ceilings=html.escape(ceiling_line(report)),
        charts="".join(parts),
        table=html.escape(text_table(report)),
    )


def size(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def per_second(tera: float | None, unit: str) -> str:
    """A rate given in 10^12 a second, with the prefix that suits it."""
    value = tera or 0.0
    return f"{value:.3g} T{unit}" if value >= 1 else f"{value * 1e3:.3g} G{unit}"


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def chart(label: str, rows: list[Row], value: Callable[[Row], float | None]) -> str:
    """An SVG of a value over the number of keys, a line an attention; `label` ends in the unit. Empty without any."""
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        y = value(row)
        if y is not None and y > 0:
            series[row.backend].append((row.case.num_k, y))
    return draw(label, series) if series else ""


def draw(label: str, series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """An SVG of (keys, value) above 0, both axes logarithmic, a line a name, its name beside the plot."""
    xs = sorted({x for line in series.values() for x, _ in line})
    ys = [y for line in series.values() for _, y in line]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 1e-9)
    high = max(high, low + 1)
    span = math.log2(xs[-1] / xs[0]) or 1.0
    right, base = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(x: int, y: float) -> tuple[float, float]:
        across = LEFT + (right - LEFT) * math.log2(x / xs[0]) / span
        return across, base - (base - TOP) * (math.log10(y) - low) / (high - low)

    marks = [_text((LEFT + right) / 2, 16, label, "middle", "t")]
    marks.append(_text((LEFT + right) / 2, HEIGHT - 6, "keys of a sequence", "middle"))
    middle = (TOP + base) / 2
    turned = _text(12, middle, label.rpartition(", ")[2], "middle")
    marks.append(f'<g transform="rotate(-90 12 {middle:.1f})">{turned}</g>')
    for decade in range(low, high + 1):
        _, y = at(xs[0], 10.0**decade)
        marks.append(f'<line class="g" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(_text(LEFT - 6, y + 4, f"{10.0**decade:g}", "end"))
    marks += [_text(at(x, ys[0])[0], base + 16, str(x), "middle") for x in xs]
    for number, (name, line) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        points = [at(x, y) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        marks.append(_text(right + 22, TOP + 4 + 15 * number, name, "start", color=color))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">{"".join(marks)}</svg>'


def _text(x: float, y: float, text: str, anchor: str, name: str = "", color: str = "") -> str:
    style = f' fill="{color}"' if color else ""
    kind = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}{kind}>{html.escape(text)}</text>'


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Attention kernels</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1440px; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1rem; margin: 1.5rem 0 .3rem }}
.row {{ display: flex; flex-wrap: wrap; gap: 1rem }}
svg {{ background: #fff; border: 1px solid #ddd }} text {{ font: 11px system-ui, sans-serif }} .t {{ font-weight: 600 }}
.g {{ stroke: #e5e5e5 }} pre {{ font-size: 12px; overflow-x: auto; background: #f7f7f7; padding: 1rem }}
</style></head><body>
<h1>Attention kernels on {machine}, torch {torch}</h1>
<p>{ceilings}. Both axes are logarithmic; the horizontal one is the number of keys.</p>
{charts}
<h2>All rows</h2><pre>{table}</pre>
</body></html>
"""
