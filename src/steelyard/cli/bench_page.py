"""Measured runs as one HTML page, complete in itself: validity, plots, tables. Asks no host for anything."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from steelyard.bench.export import ROWS, at, compare_markdown, server_lines, window_lines
from steelyard.cli.bench_plots import against_floor, trade_off, where_time_went
from steelyard.cli.plan_svg import Axis, Plot

Json = dict[str, Any]
_COLOURS = 6
STYLE = """
:root { --ink: #1d2330; --soft: #5c6577; --line: #dfe3ea; --paper: #fff; --good: #0f7a5a; --warn: #a16207;
  --bad: #b91c1c; --s0: #2458d3; --s1: #c2410c; --s2: #0f7a5a; --s3: #7c3aed; --s4: #a16207; --s5: #64748b;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --soft: #9aa4b6; --line: #2e3643; --paper: #12161d;
  --good: #5fd3a8; --warn: #e2b04a; --bad: #ff8a8a; --s0: #7ca5ff; --s1: #ff9f68; --s2: #5fd3a8; --s3: #b79bff;
  --s4: #e2b04a; --s5: #9aa4b6; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 860px; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; } p, figcaption { color: var(--soft); }
figure { margin: 1rem 0; break-inside: avoid; } svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--ink); } svg .axis, svg .note { fill: var(--soft); }
.grid { stroke: var(--line); } .rule { stroke: var(--soft); stroke-dasharray: 4 4; }
polyline { fill: none; stroke-width: 2; }
polyline.s0 { stroke: var(--s0); } polyline.s1 { stroke: var(--s1); } polyline.s2 { stroke: var(--s2); }
polyline.s3 { stroke: var(--s3); } polyline.s4 { stroke: var(--s4); } polyline.s5 { stroke: var(--s5); }
circle.s0 { fill: var(--s0); } circle.s1 { fill: var(--s1); } circle.s2 { fill: var(--s2); }
circle.s3 { fill: var(--s3); } circle.s4 { fill: var(--s4); } circle.s5 { fill: var(--s5); }
rect.s0 { fill: var(--s0); } rect.s1 { fill: var(--s1); } rect.s2 { fill: var(--s2); } rect.s3 { fill: var(--s3); }
rect.s4 { fill: var(--s4); } rect.s5 { fill: var(--s5); }
rect.less { fill: var(--good); } rect.more { fill: var(--bad); }
.key i { display: inline-block; width: 1rem; height: .25rem; margin: 0 .4rem .2rem 1rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
td, th { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child, td.text { text-align: left; }
.pass { color: var(--good); } .warn { color: var(--warn); } .fail { color: var(--bad); font-weight: 600; }
.verdict { border-left: 4px solid; padding: .3rem .8rem; font-weight: 600; }
@media print { body { margin: 0; max-width: none; } h2 { break-after: avoid; }
  details::details-content { content-visibility: visible; }
  :root { color-scheme: light; --ink: #1d2330; --soft: #5c6577; --line: #dfe3ea; --paper: #fff; --good: #0f7a5a;
  --warn: #a16207; --bad: #b91c1c; --s0: #2458d3; --s1: #c2410c; --s2: #0f7a5a; --s3: #7c3aed; --s4: #a16207; } }
"""


def page(reports: Sequence[Json], title: str = "", more: Sequence[tuple[str, str]] = (), points: bool = False) -> str:
    """The page. `more`: further sections, heading and ready HTML; `points`: the runs are those of one curve."""
    name = title or reports[0]["name"] or "Measurement"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(name)}</title><style>{STYLE}</style></head><body><h1>{html.escape(name)}</h1>",
    ]
    parts += [_validity(report, len(reports) > 1) for report in reports]
    parts += [f"<h2>{html.escape(heading)}</h2>{body}" for heading, body in more]
    if len(reports) > 1:
        parts += ["<h2>Side by side</h2>", table_of(compare_markdown(reports, points))]
    parts += ["<h2>Time to first token and time per output token</h2>", _distributions(reports)]
    parts += ["<h2>In flight, running and waiting over time</h2>", _over_time(reports)]
    if len(reports) > 1:
        parts += ["<h2>Throughput against latency</h2>", trade_off(reports)]
    for report in reports:
        head = f": {html.escape(report['name'])}" if len(reports) > 1 and report["name"] else ""
        both = against_floor(report) + where_time_went(report)
        parts += [f"<h2>Steps and accounts{head}</h2>", both] if both else []
    parts += [_tables(report) for report in reports]
    return "\n".join([*parts, "</body></html>"])


def _validity(report: Json, named: bool) -> str:
    css = "pass" if report["valid"] else "fail"
    said = "Valid" if report["valid"] else f"Not valid: {report['label']}. Not to be quoted as a result."
    name = f"{html.escape(report['name'])}: " if named and report["name"] else ""
    rows = "".join(
        f'<tr><td>{html.escape(g["name"])}</td><td class="text {g["outcome"].split()[0]}">{g["outcome"]}</td>'
        f'<td class="text">{html.escape(g["evidence"])}</td></tr>'
        for g in report["gates"]
    )
    return (
        f'<p class="verdict {css}">{name}{html.escape(said)}</p><details{"" if report["valid"] else " open"}>'
        f'<summary>Every check with its numbers</summary><div class="table"><table>{rows}</table></div></details>'
    )


def _distributions(reports: Sequence[Json]) -> str:
    """Quantiles of both latencies, a line a run: p50, p95, p99 and the ends."""
    plots = []
    for title, path in (
        ("TTFT from schedule, ms", ROWS[1][1]),
        ("TPOT, ms", ROWS[5][1]),
        ("gap between events, ms", ROWS[7][1]),
    ):
        found = [(i, at(r["summary"]["windows"]["whole run"], path)) for i, r in enumerate(reports)]
        known = [(i, s) for i, s in found if s is not None]
        if known:
            plots.append(_figure(_quantile_plot(title, known), title, reports))
    return "".join(plots) or "<p>No latencies: no request succeeded.</p>"


def _quantile_plot(title: str, stats: Sequence[tuple[int, Json]]) -> str:
    top = max(s["max"] for _, s in stats) * 1.05 or 1.0
    plot = Plot(Axis("share of values at or below", 0.0, 1.0), Axis(title, 0.0, top), title)
    for i, s in stats:
        points = [(0.0, s["min"]), (0.5, s["p50"]), (0.95, s["p95"]), (0.99, s["p99"]), (1.0, s["max"])]
        plot.line([(q, v) for q, v in s.get("curve", points)], f"s{i % _COLOURS}")
        for share, value in points[1:4]:
            plot.dot(share, value, f"s{i % _COLOURS}", "", f"{share:.0%}: {value:,.2f}")
    return plot.svg()


_SERIES = (
    ("running", "running"),
    ("waiting", "waiting"),
    ("kv_usage", "share of KV blocks in use"),
    ("kv_slack_tokens", "slots of KV reserved or unfilled"),
)


def _over_time(reports: Sequence[Json]) -> str:
    plots = []
    flight = [(i, r["summary"]["in_flight"]) for i, r in enumerate(reports) if r["summary"]["in_flight"]]
    if flight:
        plots.append(_figure(series_plot("requests in flight", flight), "Requests in flight, by the client.", reports))
    for word, title in _SERIES:
        series = [(i, at(r["summary"], ("server", "series", word)) or []) for i, r in enumerate(reports)]
        known = [(i, points) for i, points in series if len(points) > 1]
        if known:
            plots.append(_figure(series_plot(title, known), f"The server's word: {title}.", reports))
    return "".join(plots)


def series_plot(title: str, series: Sequence[tuple[int, Sequence[Sequence[float]]]]) -> str:
    """Values over seconds, a line a run."""
    last = max(points[-1][0] for _, points in series) or 1.0
    top = max(p[1] for _, points in series for p in points) * 1.1 or 1.0
    plot = Plot(Axis("seconds", 0.0, last), Axis(title, 0.0, top), title)
    for i, points in series:
        plot.line([(p[0], p[1]) for p in points], f"s{i % _COLOURS}")
    return plot.svg()


def _figure(svg: str, caption: str, reports: Sequence[Json]) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}{key([r['name'] for r in reports])}</figcaption></figure>"


def key(names: Sequence[str]) -> str:
    """Which colour is which run; nothing for one."""
    if len(names) < 2:
        return ""
    items = [
        f'<i style="background: var(--s{i % _COLOURS})"></i>{html.escape(name or f"run {i + 1}")}'
        for i, name in enumerate(names)
    ]
    return f' <span class="key">{"".join(items)}</span>'


def _tables(report: Json) -> str:
    head = f"{report['name']}: figures" if report["name"] else "Figures"
    summary = report["summary"]
    lines = [*window_lines(summary["windows"]), *server_lines(summary.get("server"))]
    parts = [f"<h2>{html.escape(head)}</h2>", blocks_of("\n".join(lines))]
    parts.append("<h2>What was run, on what</h2>")
    shown = {k: report.get(k) for k in ("command", "request", "workload", "arrivals", "environment", "server_facts")}
    rows = [f'<tr><td>{k}</td><td class="text">{html.escape(str(v))}</td></tr>' for k, v in shown.items() if v]
    parts.append(f'<div class="table"><table>{"".join(rows)}</table></div>')
    return "".join(parts)


def blocks_of(markdown: str) -> str:
    """Headings, tables and paragraphs of the Markdown that reports are written in."""
    parts: list[str] = []
    lines: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
            continue
        if lines:
            parts.append(table_of("\n".join(lines)))
            lines = []
        if line.startswith("#"):
            parts.append(f"<h3>{html.escape(line.lstrip('# '))}</h3>")
        elif line:
            parts.append(f"<p>{html.escape(line)}</p>")
    return "".join(parts)


def table_of(markdown: str) -> str:
    """A Markdown table as HTML; other lines become paragraphs."""
    rows, texts = [], []
    lines = markdown.splitlines()
    for line, after in zip(lines, [*lines[1:], ""]):
        if line.startswith("| ---"):
            continue
        if line.startswith("|"):
            kind = "th" if after.startswith("| ---") else "td"
            cells = line.strip("|").split("|")
            rows.append("<tr>" + "".join(f"<{kind}>{html.escape(c.strip())}</{kind}>" for c in cells) + "</tr>")
        elif line:
            texts.append(f"<p>{html.escape(line)}</p>")
    return f'<div class="table"><table>{"".join(rows)}</table></div>{"".join(texts)}'
