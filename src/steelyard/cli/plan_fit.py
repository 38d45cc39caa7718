"""`steelyard plan fit`: coefficients from measured steps, their errors, and doubts about whose steps they are."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from steelyard.cli.plan_text import table
from steelyard.errors import StartError
from steelyard.plan.calibration import Calibration
from steelyard.plan.costs import Setup
from steelyard.plan.fit import Errors, evaluate, fit
from steelyard.plan.formats import kv_dtype_bytes, weight_format
from steelyard.plan.models import PlannedModel
from steelyard.plan.planner import Options
from steelyard.plan.presets import preset_config, preset_name
from steelyard.plan.records import StepRecord, read_records
from steelyard.plan.roofline import Rates, Roofline
from steelyard.plan.shape import ModelShape


def show_fit(args: argparse.Namespace, model: PlannedModel, options: Options) -> int:
    """Coefficients fitted to --records, and their errors on --held-out. Returns 1 where a step is under the floor."""
    if not options.records:
        raise StartError("fit needs measured steps: --records FILE", param="records")
    weights = weight_format(options.dtype) if options.dtype else model.stored
    kv = 2 if options.kv_cache_dtype == "auto" else kv_dtype_bytes(options.kv_cache_dtype)
    roofline = Roofline(Setup(model.shape, options.device, weights, kv, options.tp))
    held_out = read_records(Path(args.held_out), "held-out") if args.held_out is not None else list(options.records)
    if args.held_out is not None:
        say_doubt(f"--held-out {args.held_out}", model.shape, held_out)
    found = fit(roofline, options.records)
    errors = evaluate(roofline, found, held_out)
    if args.json:
        of = {n: {**asdict(e), "throughput": e.throughput} for n, e in errors.items()}
        print(json.dumps({"coefficients": found.named(), "errors": of}, indent=2))
    else:
        print(_fitted(found, Rates.datasheet(options.device)))
        header = ["workload", "steps", "measured s", "predicted s", "whole time", "throughput"]
        header += ["median step", "p95 step", "under the floor"]
        print("\n".join(table(header, [[name or "-", *_error_cells(e)] for name, e in errors.items()])))
    return int(any(e.under_floor for e in errors.values()))


def say_doubt(given: str, shape: ModelShape, records: Sequence[StepRecord]) -> None:
    """Say on stderr what speaks against these records being of this model; `given`: the flag and its file."""
    if doubt := _doubt(given.partition(" ")[2], shape, records):
        print(f"steelyard plan: {given}: {doubt}", file=sys.stderr)


def _doubt(path: str, shape: ModelShape, records: Sequence[StepRecord]) -> str:
    """A workload's first word may be a model's name."""
    words = dict.fromkeys(r.workload.partition(" ")[0] for r in records)
    named = {word: name for word in words if (name := preset_name(word))}
    if len(set(named.values())) > 1:
        keep = next((word for word in named if _is(shape, word)), next(iter(named)))
        return (
            f"has steps of several models ({', '.join(named)}), and a fit is of one: keep its lines, such as by "
            f'grep \'"workload":"{keep} \' {path}'
        )
    others = [word for word in named if not _is(shape, word)]
    return f"its steps are of {others[0]} by name, and fitted as those of another model" if others else ""


def _is(shape: ModelShape, word: str) -> bool:
    """Whether a preset has this very decoder, up to how long its contexts may be."""
    theirs = ModelShape.from_config(preset_config(word))
    return replace(theirs.decoder, max_position=0) == replace(shape.decoder, max_position=0)


def _fitted(found: Calibration, peaks: Rates) -> str:
    base = "the peaks" if found.rates == peaks else "the ceilings measured on the device"
    text = (
        f"A step's fixed cost is {found.step_s * 1e3:.3f} ms, {found.lone:.0%} of that for one row alone.\n"
        f"Times what {base} allow: products x {found.arithmetic:.3f} by arithmetic, x {found.weights:.3f} by bytes, "
        f"cached KV x {found.kv:.3f},\nprefill attention x {found.attention:.3f} ({found.source}).\n"
    )
    if min(found.coefficients[2:]) < 1.0:
        text += (
            "A factor below 1 is of steps faster than those ceilings, which so are too low; none is above the peaks.\n"
        )
    return text


def _error_cells(e: Errors) -> list[str]:
    times = [f"{e.num_steps}", f"{e.measured_s:.3f}", f"{e.predicted_s:.3f}", f"{e.total:+.1%}", f"{e.throughput:+.1%}"]
    return [*times, f"{e.median_abs:.1%}", f"{e.p95_abs:.1%}", f"{e.under_floor}"]
