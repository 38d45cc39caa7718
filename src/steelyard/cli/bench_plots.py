"""Plots of measured runs beyond the plain ones: throughput against latency, steps against the floor, accounts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from steelyard.bench.ablate import accounts
from steelyard.bench.export import at
from steelyard.cli.bars_svg import bars
from steelyard.cli.plan_svg import Axis, Plot
from steelyard.core.digits import in_digits

Json = dict[str, Any]
_COLOURS = 6
_TPOT, _TTFT = ("tpot_ms", "p50"), ("latency_ms", "user", "ttft", "p50")


def trade_off(reports: Sequence[Json]) -> str:
    """A run a dot: output tokens a second against both latencies. Empty for a single run."""
    found = []
    for title, path in (("TPOT p50, ms", _TPOT), ("TTFT p50 from schedule, ms", _TTFT)):
        points = []
        for i, report in enumerate(reports):
            whole = report["summary"]["windows"]["whole run"]
            y = at(whole, path)
            if y is not None:
                points.append((i, whole["output_tokens_per_s"], y, report["name"] or f"run {i + 1}"))
        if len(points) < 2:
            continue
        x_axis = Axis("output tokens a second", 0.0, 1.15 * max(p[1] for p in points) or 1.0)
        plot = Plot(x_axis, Axis(title, 0.0, 1.15 * max(p[2] for p in points) or 1.0), title)
        for i, x, y, name in points:
            plot.dot(x, y, f"s{i % _COLOURS}", name, f"{name}: {in_digits(x)} tok/s, {in_digits(y)} ms")
        found.append(figure(plot.svg(), f"Throughput against {title}: right and low is better."))
    return "".join(found)


def against_floor(report: Json) -> str:
    """What a token took, what the device computed in a step, and what physics needs; those that are known."""
    server, whole = report["summary"].get("server") or {}, report["summary"]["windows"]["whole run"]
    rows: list[tuple[str, float, str]] = []
    if report.get("floor_tpot_ms") is not None:
        rows.append(("floor: weights over bandwidth", report["floor_tpot_ms"], "s2"))
    if server.get("steps") and server.get("device_s") is not None:
        rows.append(("device time of a step, mean", 1e3 * server["device_s"] / server["steps"], "s0"))
    if at(whole, _TPOT) is not None:
        rows.append(("time per output token, p50", at(whole, _TPOT), "s1"))
    if len(rows) < 2:
        return ""
    missing = "" if report.get("floor_tpot_ms") is not None else " The floor was not asked for (--plan-model)."
    return figure(bars(rows, "step time against floor", "ms"), f"A step against what it needs.{missing}")


def where_time_went(report: Json) -> str:
    """Milliseconds of a mean request by the server's accounts, which sum to its time."""
    parts = accounts(report)
    if not parts:
        return ""
    rows = [(name, value, "s0") for name, value in parts.items() if value > 0.0]
    return figure(bars(rows, "time by account", "ms"), "Where a request's time went in the server, mean of all.")


def figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"
