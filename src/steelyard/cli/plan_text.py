"""A plan as tables in a terminal. Layout and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from steelyard.plan.calibration import Calibration
from steelyard.plan.costs import attention_traffic
from steelyard.plan.explain import Figure, figures
from steelyard.plan.planner import Plan, StepRow

_SECTIONS = {
    "device": "Device",
    "model": "Model",
    "kv": "KV cache",
    "memory": "Memory of one device",
    "capacity": "Capacity",
}


def render(plan: Plan, *, explain: bool = False) -> str:
    """The whole plan; with `explain`, a formula under each number."""
    lines = [_headline(plan), ""]
    found = figures(plan)
    for section in ("device", "model", "kv", "memory"):
        lines += [*_section(found, section, explain), ""]
    if not plan.fits:
        lines += [_does_not_fit(plan), ""]
    for title, rows in (("Decode step", plan.decodes), ("Prefill", plan.prefills)):
        lines += steps(title, rows)
        lines += _steps_explained(plan.calibration, rows) if explain else []
        lines += [""] if title != "Prefill" else [_attention_traffic(plan), ""]
    if plan.capacity is not None:
        lines += [*_section(found, "capacity", explain), ""]
        if not plan.capacity.feasible:
            lines += ["  The load is beyond this many replicas: the queue grows, and no target is met.", ""]
        lines += [*_changes(plan), ""]
    lines.append(f"Estimates: {plan.calibration.source}.")
    lines += [f"Note: {note}." for note in plan.notes]
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned right, the first one left, two spaces apart."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths)))
        return "  " + "  ".join((first, *rest)).rstrip()

    return [line(header), *(line(r) for r in rows)]


def steps(title: str, rows: Sequence[StepRow]) -> list[str]:
    """A table of step times: floor, reach if measured, estimate, and what bounds the step."""
    if not rows:
        return []
    is_decode = rows[0].num_tokens == rows[0].batch
    reached = rows[0].reach is not None
    header = ["batch x context" if is_decode else "tokens", "floor ms"] + (["reach ms"] if reached else [])
    header += ["estimate ms", "tokens/s", "bound by", "FLOP/B", "MBU", "MFU", ""]
    body = [_step_cells(row, is_decode) for row in rows]
    return [title, *table(header, body)]


def _steps_explained(calibration: Calibration, rows: Sequence[StepRow]) -> list[str]:
    """Formulas of a table of steps, with what went into each line."""
    c = calibration
    lines = ["", "  floor = sum over parts of max(FLOPs / peak, bytes / bandwidth):"]
    lines += [f"    {text}" for row in rows for text in _parts(row)]
    lines += [
        "",
        "  estimate = fixed + products + cached KV + prefill attention, of which",
        f"    fixed is {c.step_s * 1e3:.3g} ms, x {c.lone:.2g} for one row alone",
        f"    products are smooth max({c.arithmetic:.3g} x FLOPs / peak, {c.weights:.3g} x bytes / bandwidth)",
        f"      and {c.weights:.3g} x bytes that kernels pass on / bandwidth",
        f"    cached KV is {c.kv:.3g} x its floor, keys read in whole tiles",
        f"    prefill attention is {c.attention:.3g} x its floor",
    ]
    for row in rows:
        terms = " + ".join(f"{seconds * 1e3:.3f}" for seconds in row.terms.values())
        lines.append(f"    {_name(row):>14}  {terms} = {row.estimate.ms:.3f} ms")
    lines += [
        "",
        "  tokens/s = tokens / estimate; FLOP/B = FLOPs / bytes; MBU = bytes / (bandwidth x estimate); "
        "MFU = FLOPs / (peak x estimate)",
    ]
    return lines


def _name(row: StepRow) -> str:
    return f"{row.batch} x {row.context_len}" if row.num_tokens == row.batch else f"{row.num_tokens} tokens"


def _step_cells(row: StepRow, is_decode: bool) -> list[str]:
    name = f"{row.batch} x {row.context_len}" if is_decode else f"{row.num_tokens}"
    reach = [f"{row.reach.ms:.3f}"] if row.reach is not None else []
    cells = [name, f"{row.floor.ms:.3f}", *reach, f"{row.estimate.ms:.3f}"]
    cells += [f"{row.num_tokens / row.estimate.seconds:,.0f}", f"{row.time.bound} ({row.time.bound_part})"]
    cells += [f"{row.time.intensity:.1f}", f"{row.mbu:.0%}", f"{row.mfu:.0%}"]
    return [*cells, "" if row.fits else "does not fit"]


def _parts(row: StepRow) -> Iterator[str]:
    for part in row.time.parts:
        work = f"{part.cost.flops / 1e9:,.2f} GFLOP {part.compute_s * 1e3:.3f} ms"
        size = part.cost.link_bytes or part.cost.bytes
        moved = f"{size / 1e9:,.3f} GB {part.memory_s * 1e3:.3f} ms"
        yield f"{_name(row):>14}  {part.name:<18} {work}, {moved}: {part.bound}"


def _attention_traffic(plan: Plan) -> str:
    longest = plan.prefills[-1].num_tokens
    naive, tiled = attention_traffic(plan.model.shape, longest)
    said = f"  Attention of {longest:,} tokens moves {tiled / 1e9:,.1f} GB in tiles"
    return f"{said}, {naive / 1e9:,.1f} GB ({naive / tiled:.0f} x) with scores written out."


def _headline(plan: Plan) -> str:
    setup, options = plan.setup, plan.options
    where = f"{setup.tp} x {setup.device.name}" if setup.tp > 1 else setup.device.name
    kv = {1: "8-bit", 2: "16-bit", 4: "32-bit"}[setup.kv_dtype_bytes]
    load = options.load
    said = f"; {load.rate:g} requests/s of {load.input_len:g} + {load.output_len:g} tokens" if load else ""
    return f"{plan.model.shape.name} ({plan.model.source}) on {where}, weights {setup.weights.name}, {kv} KV{said}"


def _section(found: Sequence[Figure], section: str, explain: bool) -> list[str]:
    mine = [f for f in found if f.section == section]
    width = max((len(f.label) for f in mine), default=0)
    lines = [_SECTIONS[section]]
    for figure in mine:
        lines.append(f"  {figure.label.ljust(width)}  {figure.text}")
        if explain:
            lines.append(f"  {' ' * width}    = {figure.formula}")
    return lines


def _changes(plan: Plan) -> list[str]:
    rows = [[c.name, f"x {c.factor:.3f}"] for c in plan.changes]
    return ["What would help (capacity of a replica)", *table(["change", "rate"], rows)]


def _does_not_fit(plan: Plan) -> str:
    over = -plan.budget.kv_bytes / 2**30
    return (
        f"  DOES NOT FIT: {max(over, 0.0):.2f} GiB too much before any KV. More devices (--tp), fewer bits "
        "(--dtype fp8, int4), a smaller --max-num-batched-tokens, or a larger device."
    )
