"""A report written for others: vLLM's result JSON, CSV, Markdown. Only numbers that are in the report."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from steelyard.bench.record import Clock, RequestRecord
from steelyard.bench.summary import Json
from steelyard.core.digits import in_digits

PERCENTILES = ("p50", "p95", "p99")


def vllm_json(report: Json, records: Sequence[RequestRecord]) -> Json:
    """The keys that `vllm bench serve --save-result` writes, with that tool's meanings.

    Its ITL is the gap between chunks and its clock starts at sending, so these are our ICL and service latencies.
    """
    whole = report["summary"]["windows"]["whole run"]
    service = whole["latency_ms"]["service"]
    good = [r for r in records if r.ok]
    total_in = sum(r.usage.prompt_tokens or r.asked_prompt_tokens for r in good)
    total_out = sum(r.num_tokens or 0 for r in good)
    seconds = whole["seconds"]
    found: Json = {
        "date": datetime.fromtimestamp(report.get("started_unix_s", 0), UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "model_id": report.get("request", {}).get("model"),
        "num_prompts": len(records),
        "request_rate": report["arrivals"]["rate"] or "inf",
        "burstiness": report["arrivals"]["burstiness"],
        "max_concurrency": report["arrivals"]["max_concurrency"],
        "duration": seconds,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / seconds,
        "request_goodput": whole.get("goodput_requests_per_s"),
        "output_throughput": total_out / seconds,
        "total_token_throughput": (total_in + total_out) / seconds,
        "input_lens": [r.usage.prompt_tokens or r.asked_prompt_tokens for r in good],
        "output_lens": [r.num_tokens or 0 for r in good],
        "ttfts": [(r.ttft_ns(Clock.SERVICE) or 0) / 1e9 for r in good],
        "itls": [[gap / 1e9 for gap in r.icl_ns()] for r in good],
        "errors": [r.detail for r in records],
    }
    pairs = (("ttft", service["ttft"]), ("tpot", whole["tpot_ms"]), ("itl", whole["icl_ms"]), ("e2el", service["e2e"]))
    for name, stats in pairs:
        if stats is not None:
            found |= {f"mean_{name}_ms": stats["mean"], f"median_{name}_ms": stats["p50"]}
            found |= {f"{p}_{name}_ms": stats[p] for p in PERCENTILES}
    return found


ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("TTFT, from sending (ms)", ("latency_ms", "service", "ttft")),
    ("TTFT, from schedule (ms)", ("latency_ms", "user", "ttft")),
    ("TTFO, from sending (ms)", ("latency_ms", "service", "ttfo")),
    ("E2E, from sending (ms)", ("latency_ms", "service", "e2e")),
    ("E2E, from schedule (ms)", ("latency_ms", "user", "e2e")),
    ("TPOT, by request (ms)", ("tpot_ms",)),
    ("ITL, by token (ms)", ("itl_ms",)),
    ("ICL, by event (ms)", ("icl_ms",)),
    ("longest stall of a request (ms)", ("max_stall_ms",)),
    ("schedule delay (ms)", ("delay_ms",)),
)
RATES: tuple[tuple[str, str], ...] = (
    ("output tokens/s", "output_tokens_per_s"),
    ("input tokens/s", "input_tokens_per_s"),
    ("  of them computed", "input_computed_tokens_per_s"),
    ("  of them from the cache", "input_cached_tokens_per_s"),
    ("requests/s", "request_rate"),
    ("attainment, of all scheduled", "attainment"),
    ("  its lower bound (95 %)", "attainment_lower"),
    ("goodput, requests/s", "goodput_requests_per_s"),
    ("goodput, tokens/s", "goodput_tokens_per_s"),
    ("in flight, mean", "mean_in_flight"),
    ("Little residual", "little_residual"),
    ("tokens per event", "tokens_per_event"),
)


def at(value: Any, path: Sequence[str]) -> Any:
    """A nested value, or None."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def to_markdown(report: Json) -> str:
    """Validity first, then the numbers of both windows, the server's side, and what was run."""
    summary = report["summary"]
    verdict = "valid" if report["valid"] else f"NOT VALID: {report['label']}. Do not quote these numbers as results."
    lines = [f"# {report['name'] or 'Measurement'}", "", f"**{verdict}**", "", "| gate | outcome | evidence |"]
    lines += ["| --- | --- | --- |"]
    lines += [f"| {g['name']} | {g['outcome']} | {g['evidence']} |" for g in report["gates"]]
    lines += window_lines(summary["windows"])
    lines += ["", "p99 in brackets: too few requests to decide by it. Quantiles: " + summary["estimator"] + "."]
    if summary["failures"]:
        lines += ["", "## Failures", ""] + [f"* {n} {kind}" for kind, n in summary["failures"].items()]
        lines += [f"* {detail}" for detail in summary["failure_details"]]
    lines += server_lines(summary.get("server"))
    lines += ["", "## What was run", ""]
    lines += [f"* {key}: {_said(value)}" for key, value in _facts(report).items() if value is not None]
    return "\n".join(lines) + "\n"


def window_lines(windows: Json) -> list[str]:
    """A Markdown section a window: the first whole, of the others what differs from it."""
    lines: list[str] = []
    shown: set[str] = set()
    for name, window in windows.items():
        counted = f"{window['ok']} of {window['scheduled']} {'sent in it ' if shown else ''}ok"
        lines += ["", f"## {name.capitalize()}: {window['seconds']:.1f} s, {counted}"]
        stats = [_stat_row(title, found) for title, path in ROWS if (found := at(window, path)) is not None]
        rates = [f"| {title} | {_rate(key, window[key])} |" for title, key in RATES if window.get(key) is not None]
        num_rows = len(stats) + len(rates)
        stats, rates = ([row for row in rows if row not in shown] for rows in (stats, rates))
        if stats:
            lines += ["", "| latency | n | mean | p50 | p95 | p99 | max |", "|" + " --- |" * 7, *stats]
        if rates:
            lines += ["", "| rate | value |", "| --- | --- |", *rates]
        if shown and rates:
            lines += ["", _part_line(window)]
        if len(stats) + len(rates) < num_rows:
            which = "Every other figure" if stats or rates else "Every figure"
            lines += ["", f"{which} is the same as over the {next(iter(windows))}."]
        shown = shown or {*stats, *rates}
    return lines


def _part_line(window: Json) -> str:
    """Which requests each figure of a part of the run counts: those of the latencies are not those of the rates."""
    ended = round(window["request_rate"] * window["seconds"])
    return (
        f"Latencies, attainment and goodput are of the {window['scheduled']:,} requests sent in this part; requests/s "
        f"counts the {ended:,} that ended in it, tokens/s the tokens that came in it."
    )


def _rate(key: str, value: float) -> str:
    """The residual is a share that is compared with 5 %; the others are figures."""
    return f"{value:.2%}" if key == "little_residual" else in_digits(value)


def _said(value: Any) -> str:
    """A table as `name value, name value`, of what has a value; whatever else as it is."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{k} {v}" for k, v in value.items() if v is not None and str(v).strip())


def _stat_row(title: str, stats: Json) -> str:
    p99 = f"{stats['p99']:,.2f}" if stats["p99_quotable"] else f"({stats['p99']:,.2f})"
    cells = f"{stats['mean']:,.2f} | {stats['p50']:,.2f} | {stats['p95']:,.2f} | {p99} | {stats['max']:,.2f}"
    return f"| {title} | {stats['n']:,} | {cells} |"


SERVER_GAUGES = {
    "running": "running",
    "waiting": "waiting",
    "kv_usage": "share of KV blocks in use",
    "kv_slack_tokens": "slots reserved or unfilled",
    "kv_blocks_peak": "most KV blocks in use since its start",
    "kv_largest_run": "blocks one request could take",
}
SERVER_COUNTS = {
    "token_ratio": "client's tokens over the server's",
    "prefix_hit_rate": "prefix hit rate",
    "preemptions": "preemptions",
    "recomputed_tokens": "positions computed again",
    "overshoot_tokens": "tokens computed beyond ends",
    "steps": "steps",
    "device_s": "device time of steps, s",
    "step_tokens": "positions computed for requests",
    "padded_tokens": "positions of padding",
    "held_slots": "slots held empty",
    "kv_fragmented": "allocations refused though blocks were free",
}


def server_lines(side: Json | None) -> list[str]:
    """The server's own numbers as a Markdown section; that it has none, where it has none."""
    if side is None:
        return ["", "## The server's side", "", "It has no /metrics page: its queue and memory are not known."]
    lines = ["", "## The server's side, over the same run", "", "| what | value |", "| --- | --- |"]
    for word, title in SERVER_GAUGES.items():
        if side.get(word) is not None:
            lines.append(f"| {title} | mean {in_digits(side[word]['mean'])}, max {in_digits(side[word]['max'])} |")
    lines += [f"| {title} | {in_digits(side[w])} |" for w, title in SERVER_COUNTS.items() if side.get(w) is not None]
    if side["absent"]:
        lines += ["", f"Not read, because the server has no such metric: {', '.join(side['absent'])}."]
    return lines


def _facts(report: Json) -> Json:
    environment, arrivals, work = report.get("environment", {}), report["arrivals"], report["workload"]
    server = report.get("server_facts", {})
    gpus = [g.get("name") for g in environment.get("gpus", ())]
    return {
        "command": report["command"] or None,
        "model": report.get("request", {}).get("model"),
        "server": report.get("request", {}).get("base_url"),
        "server configuration, read back": server.get("config"),
        "client's machine": f"{environment.get('cpu')}, {environment.get('cores')} cores, GPUs: {gpus or 'none'}",
        "versions": f"steelyard {environment.get('steelyard')}, Python {environment.get('python')}",
        "arrivals": arrivals,
        "workload": work,
    }


def to_csv(reports: Sequence[Json]) -> str:
    """One row a report and window."""
    out = io.StringIO()
    writer = csv.writer(out)
    names = [f"{title} {p}" for title, _ in ROWS for p in ("mean", *PERCENTILES)]
    writer.writerow(["run", "window", "valid", "label", *names, *(title.strip() for title, _ in RATES)])
    for report in reports:
        for window, values in report["summary"]["windows"].items():
            stats = [at(values, (*path, p)) for _, path in ROWS for p in ("mean", *PERCENTILES)]
            rates = [values.get(key) for _, key in RATES]
            writer.writerow([report["name"], window, report["valid"], report["label"], *stats, *rates])
    return out.getvalue()


def compare_markdown(reports: Sequence[Json], points: bool = False) -> str:
    """Several runs side by side: medians and rates, each with its validity.

    `points`: they are of one curve, and differ in work by design; else it is said where they do.
    """
    heads = [r["name"] or f"run {i + 1}" for i, r in enumerate(reports)]
    lines = ["| whole run | " + " | ".join(heads) + " |", "| --- " * (len(heads) + 1) + "|"]
    lines.append("| valid | " + " | ".join(r["label"] for r in reports) + " |")
    whole = [r["summary"]["windows"]["whole run"] for r in reports]
    for title, path in ROWS:
        for p in ("p50", "p99"):
            values = [at(w, (*path, p)) for w in whole]
            if any(v is not None for v in values):
                lines.append(f"| {title} {p} | " + " | ".join("" if v is None else f"{v:,.2f}" for v in values) + " |")
    for title, key in RATES:
        values = [w.get(key) for w in whole]
        if any(v is not None for v in values):
            lines.append(f"| {title} | " + " | ".join("" if v is None else _rate(key, v) for v in values) + " |")
    digests = {r["workload"]["digest"] for r in reports}
    if len(digests) > 1 and not points:
        lines += ["", "The runs did different work (their workload hashes differ): ratios between them mean little."]
    return "\n".join(lines) + "\n"
