"""A plan as one HTML page with plots, complete in itself: no script, no font and no host is asked for anything."""

from __future__ import annotations

import html

from steelyard.cli.plan_svg import Axis, Plot, bar
from steelyard.cli.plan_text import render
from steelyard.plan.costs import decode
from steelyard.plan.memory import GIB
from steelyard.plan.planner import Plan
from steelyard.plan.roofline import PartTime, Roofline

_STYLE = """
:root { --ink: #1d2330; --soft: #5c6577; --line: #dfe3ea; --paper: #fff; --a: #2458d3; --b: #c2410c; --c: #0f7a5a;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --soft: #9aa4b6; --line: #2e3643; --paper: #12161d;
  --a: #7ca5ff; --b: #ff9f68; --c: #5fd3a8; } }
body { margin: 2rem auto; max-width: 760px; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; } p { color: var(--soft); }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); }
svg .axis, svg .note { fill: var(--soft); } .grid { stroke: var(--line); } .limit { stroke: var(--ink);
  stroke-width: 2; } .rule { stroke: var(--soft);
  stroke-dasharray: 4 4; }
polyline { fill: none; stroke-width: 2; } .roof { stroke: var(--ink); } .curve { stroke: var(--a); }
.decode { fill: var(--a); } .prefill { fill: var(--b); } .here { fill: var(--c); }
.c0 { fill: #64748b; } .c1 { fill: #2458d3; } .c2 { fill: #c2410c; } .c3 { fill: #a16207; } .c4 { fill: #7c3aed; }
.c5 { fill: #0f7a5a; } .c6 { fill: #94a3b8; }
pre { overflow-x: auto; font-size: 12.5px; line-height: 1.45; border-top: 1px solid var(--line); padding-top: 1rem; }
"""


def page(plan: Plan) -> str:
    """The page's HTML: roofline, throughput against time per token, memory, and the tables below."""
    name = html.escape(f"{plan.model.shape.name} on {plan.setup.tp} x {plan.setup.device.name}")
    ridge = plan.setup.device.ridge(plan.setup.weights.compute_kind)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{name}</title><style>{_STYLE}</style></head><body><h1>{name}</h1>",
        "<h2>Roofline</h2><p>Parts of decode steps (blue, by batch) and of a prefill (orange) on the datasheet's "
        f"roof. Left of the ridge at {ridge:.0f} FLOPs a byte memory bounds a part, right of it arithmetic.</p>",
        _roofline(plan),
        *_throughput_section(plan),
        "<h2>Memory of one device</h2>",
        _memory(plan),
        f"<h2>The plan, with formulas</h2><pre>{html.escape(render(plan, explain=True))}</pre></body></html>",
    ]
    return "\n".join(parts)


def _roofline(plan: Plan) -> str:
    device, kind = plan.setup.device, plan.setup.weights.compute_kind
    peak, ridge = device.flops(kind), device.ridge(kind)
    shown = [p.cost.intensity for row in (*plan.decodes, plan.prefills[-1]) for p in row.time.parts if p.cost.bytes]
    low, high = min(0.25, *shown), max(20 * ridge, 1.5 * max(shown))
    plot = Plot(
        Axis("FLOPs per byte", low, high, log=True),
        Axis("FLOP/s", low * device.bandwidth, peak * 2, log=True),
        "Roofline: attainable FLOP/s by FLOPs per byte, with the model's operations",
    )
    plot.line([(low, low * device.bandwidth), (ridge, peak), (high, peak)], "roof")
    plot.rule(ridge, f"ridge {ridge:.0f}")
    for row in plan.decodes:
        names = {"weights": f"batch {row.batch}"}
        if row is plan.decodes[0]:
            names["attention_decode"] = "decode attention"
        for part in row.time.parts:
            _operation(plot, part, "decode", names.get(part.name, ""))
    longest = plan.prefills[-1]
    names = {"weights": f"prefill of {longest.num_tokens}", "attention_prefill": "its attention"}
    for part in longest.time.parts:
        _operation(plot, part, "prefill", names.get(part.name, ""))
    return plot.svg()


def _operation(plot: Plot, part: PartTime, css: str, text: str) -> None:
    """A part at its intensity, on the roof: what it can attain."""
    if not part.cost.flops or not part.cost.bytes:
        return
    rate = part.cost.flops / part.seconds
    tip = f"{part.name}: {part.cost.intensity:.1f} FLOP/B, {part.seconds * 1e3:.3f} ms, bound by {part.bound}"
    plot.dot(part.cost.intensity, rate, css, text, tip)


def _throughput_section(plan: Plan) -> list[str]:
    title = "<h2>Throughput against time per token</h2>"
    if not plan.max_sequences:
        return [title, f"<p>No sequence of {plan.context_len:,} tokens fits this device.</p>"]
    said = f"Decode steps from batch 1 up to what memory holds, at {plan.context_len:,} tokens of context"
    if plan.capacity is not None:
        said += f"; from batch {plan.capacity.knee_batch:,} on a row more costs more time per token than it gains"
    return [title, f"<p>{said}.</p>", _throughput(plan)]


def _throughput(plan: Plan) -> str:
    roofline = Roofline(plan.setup)
    top = plan.max_sequences
    batches = sorted({max(round(top ** (k / 40)), 1) for k in range(41)})
    points = []
    for batch in batches:
        seconds = plan.calibration.estimate(roofline, decode(batch, plan.context_len)).seconds
        points.append((seconds * 1e3, batch / seconds))
    slo = plan.options.slo.tpot_s
    widest = max(points[-1][0], (slo or 0.0) * 1e3) * 1.1
    plot = Plot(
        Axis("time per output token, ms", 0.0, widest),
        Axis("output tokens/s, one replica", 0.0, max(y for _, y in points) * 1.15),
        "Throughput against time per output token as the batch grows",
    )
    plot.line(points, "curve")
    if slo is not None:
        plot.rule(slo * 1e3, f"target {slo * 1e3:g} ms")
    for batch, (x, y) in list(zip(batches, points))[:: max(len(batches) // 6, 1)]:
        plot.dot(x, y, "decode", f"{batch}", f"batch {batch}: {x:.2f} ms, {y:,.0f} tokens/s")
    found = plan.capacity
    if found is not None and found.point.decoding:
        x, y = found.latency.tpot_s * 1e3, found.output_tokens_per_s / found.replicas
        plot.dot(x, y, "here", "the load", f"the load: {x:.2f} ms, {y:,.0f} tokens/s a replica, prompts included")
    return plot.svg()


def _memory(plan: Plan) -> str:
    pieces = [(name, size / GIB) for name, size in plan.budget.terms().items()]
    limit = plan.budget.total_bytes / GIB
    said = "" if plan.fits else "<p>The model does not fit: no byte is left for KV.</p>"
    return said + bar(pieces, "GiB", "Memory of one device by what holds it", limit)
