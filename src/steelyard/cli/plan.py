"""`steelyard plan`: what serving a model will cost, before anything runs. Reads flags, prints; the sums are elsewhere.

plan MODEL            bytes, times and, with a load, capacity
plan compare MODEL    the same for alternatives, each a --to
plan tune MODEL       a value for every serving parameter
plan cache MODEL      what cached KV is worth: reuse, swap, transfer, compaction
plan waste MODEL      reserving KV memory against paging it, replayed
plan fit MODEL        calibrate to measured steps, and test that on others
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from steelyard.cli import plan_fit, plan_flags, plan_text, plan_topics
from steelyard.cli.values import above, new_file, real, span, whole, wholes
from steelyard.errors import StartError, reason
from steelyard.plan.defaults import ON_GPU
from steelyard.plan.device import Device, ceilings_toml, find_device
from steelyard.plan.models import PlannedModel, find_model
from steelyard.plan.planner import BATCHES, Options, Plan, make_plan
from steelyard.plan.records import read_records
from steelyard.plan.report import to_json
from steelyard.plan.tune import tune
from steelyard.plan.workload import Slo, Workload, from_trace, read_trace

TOPICS = ("compare", "tune", "cache", "waste", "fit")
SHOW_NOTES = ("", "compare")
"""Topics whose answer has a plan's notes."""
TOPICS_HELP = """topics, a word before MODEL:
  compare   the plan beside that of alternatives, each a --to
  tune      a value for every serving parameter, why, and the command to start with
  cache     what cached KV is worth: computing it, swapping it in, fetching it, deleting history
  waste     reserving KV memory against paging it, replayed
  fit       calibrate to measured steps (--records), and test that on others (--held-out)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "steelyard plan [compare|tune|cache|waste|fit] MODEL [--device NAME] [options]"
    parser.description = f"{parser.description}\n\n{TOPICS_HELP}"
    what = "what to plan for: a directory, config.json or GGUF file, a preset or a hub id; a topic may stand before it"
    add("words", nargs="*", metavar="MODEL", help=what)
    add("--device", metavar="NAME", help="an accelerator's name, or a .toml file with one (default: H200)")
    add("--measure", action="store_true", help="measure the ceilings of the device in this machine and use them")
    add("--save", type=new_file, metavar="FILE", help="with --measure: write the device with its ceilings as TOML")
    group = parser.add_argument_group("configuration", "as the flags of `steelyard serve`, with its defaults on a GPU")
    _add_configuration(group)
    group = parser.add_argument_group("load and targets")
    _add_load(group)
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--json", action="store_true", help="print data with stable keys in place of tables")
    add("--explain", action="store_true", help="under each number, the formula and what went into it")
    add(
        "--plot",
        type=new_file,
        metavar="FILE",
        help="write a page with plots: roofline, throughput against TPOT, memory",
    )
    plan_topics.add_arguments(parser)
    plan_flags.keep_defaults(parser)


def _add_configuration(group: Any) -> None:
    add, default = group.add_argument, ON_GPU
    add("--tensor-parallel-size", "--tp", type=whole(1), default=1, dest="tp", metavar="N", help="devices of a replica")
    add("--dtype", metavar="NAME", help="of weights: bfloat16, fp8, int4, q4_k, ... (default: as stored)")
    add("--kv-cache-dtype", default="auto", metavar="NAME", help="bfloat16, fp8, float32 (default: bfloat16)")
    what = "of a sequence, in the tables; the first one in the memory table (default: input + output, or 4096)"
    add("--context", type=wholes(1), default=(), metavar="TOKENS,...", help=what)
    add(
        "--gpu-memory-utilization",
        type=above(0, 1),
        default=default.gpu_memory_utilization,
        metavar="SHARE",
        help="(default: %(default)s)",
    )
    add("--block-size", type=whole(1), default=default.block_size, metavar="TOKENS", help="(default: %(default)s)")
    add("--max-num-seqs", type=whole(1), default=default.max_num_seqs, metavar="N", help="(default: %(default)s)")
    add(
        "--max-num-batched-tokens",
        type=whole(1),
        default=default.max_num_batched_tokens,
        metavar="TOKENS",
        help="(default: %(default)s)",
    )
    add("--enforce-eager", action="store_true", help="no CUDA graphs, and no memory for them")
    add("--batch", type=wholes(1), default=BATCHES, metavar="N,...", help="rows of a decode step, in the table")
    add("--records", metavar="FILE", help="measured steps (JSON Lines) to calibrate the estimates with")


def _add_load(group: Any) -> None:
    add = group.add_argument
    add("--rate", type=above(0), metavar="R", help="requests per second")
    add("--input", type=whole(1), metavar="TOKENS", help="of a prompt, mean")
    add("--output", type=whole(1), metavar="TOKENS", help="of an answer, mean")
    add(
        "--cached-tokens",
        type=whole(0),
        default=0,
        metavar="TOKENS",
        help="of a prompt found in the prefix cache, mean",
    )
    add("--arrival-cv", type=real(0), default=1.0, metavar="CV", help="burstiness of arrivals (default: 1, Poisson)")
    add("--trace", metavar="FILE", help="rate and lengths from a trace: Mooncake JSON Lines or Azure CSV")
    add("--ttft", type=span("s"), metavar="TIME", help="target for the time to first token, such as 500ms")
    add("--tpot", type=span("s"), metavar="TIME", help="target for the time per output token, such as 50ms")
    add("--attainment", type=above(0, 1), default=0.9, metavar="SHARE", help="of requests within --ttft (default: 0.9)")
    add("--replicas", type=whole(1), metavar="N", help="(default: as few as meet the targets)")
    add("--price-per-hour", type=real(0), metavar="PRICE", help="of one device, for the cost per million tokens")


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 1 where the model does not fit; raises StartError for bad input, naming the field."""
    words = list(args.words)
    topic = words.pop(0) if words and words[0] in TOPICS else ""
    only_measures = args.measure and not words and not topic
    plan_flags.refuse_unread(args, "--measure" if only_measures else topic)
    device = _device(args)
    if args.measure or topic not in SHOW_NOTES:
        for doubt in device.doubts:
            print(f"steelyard plan: {doubt}; measure again when it is quiet", file=sys.stderr)
    if only_measures:
        return 0
    if len(words) != 1:
        said = " ".join(words) or "nothing"
        raise StartError(f"MODEL: expected one model after {topic or 'plan'}, got {said}", param="model")
    model = find_model(words[0])
    load = _load(args) if "rate" in plan_flags.READ_BY[topic] else None
    options = _options(args, device, load)
    if options.records:
        plan_fit.say_doubt(f"--records {args.records}", model.shape, options.records)
    if topic == "compare":
        return plan_topics.compare(args, model, options)
    if topic == "tune":
        return plan_topics.show_tuned(args, tune(model, words[0], options))
    if topic == "cache":
        return plan_topics.show_cache(args, make_plan(model, options))
    if topic == "waste":
        return plan_topics.show_waste(args, make_plan(model, options))
    if topic == "fit":
        return plan_fit.show_fit(args, model, options)
    return _show(args, model, options)


def _show(args: argparse.Namespace, model: PlannedModel, options: Options) -> int:
    plan = make_plan(model, options)
    if args.plot is not None:
        _write_plot(Path(args.plot), plan)
    if args.json:
        print(json.dumps(to_json(plan), indent=2, allow_nan=False))
    else:
        print(plan_text.render(plan, explain=args.explain))
    return 0 if plan.fits else 1


def _write_plot(path: Path, plan: Plan) -> None:
    page = importlib.import_module("steelyard.cli.plan_plot").page(plan)
    try:
        path.write_text(page)
    except OSError as error:
        raise StartError(f"--plot {path}: cannot be written ({reason(error)})", param="plot") from error


def _device(args: argparse.Namespace) -> Device:
    if not args.measure:
        if args.save:
            raise StartError("--save needs --measure: there are no ceilings to write otherwise", param="save")
        return find_device("H200" if args.device is None else args.device)
    ceilings = importlib.import_module("steelyard.perf.ceilings")
    device: Device = ceilings.measure(args.device)
    text = ceilings_toml(device)
    if args.save:
        try:
            Path(args.save).write_text(text)
        except OSError as error:
            raise StartError(f"--save {args.save}: cannot be written ({reason(error)})", param="save") from error
    if not args.words:
        print(text, end="")
    return device


def _options(args: argparse.Namespace, device: Device, load: Workload | None) -> Options:
    return Options(
        device=device,
        tp=args.tp,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        contexts=args.context,
        share=args.gpu_memory_utilization,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enforce_eager=args.enforce_eager,
        batches=args.batch,
        load=load,
        slo=Slo(args.ttft, args.tpot, args.attainment),
        replicas=args.replicas,
        price_per_hour=args.price_per_hour,
        records=tuple(read_records(Path(args.records))) if args.records is not None else (),
    )


def _load(args: argparse.Namespace) -> Workload | None:
    if args.trace:
        load = from_trace(read_trace(Path(args.trace)), cached_tokens=args.cached_tokens)
        return load if args.rate is None else replace(load, rate=args.rate)
    given = {"rate": args.rate, "input": args.input, "output": args.output}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3:
        return None
    if missing:
        raise StartError(f"--{missing[0]} is missing: a load needs --rate, --input and --output", param=missing[0])
    if not 0.0 <= args.arrival_cv < float("inf"):
        raise StartError(f"--arrival-cv must be a number of at least 0, got {args.arrival_cv:g}", param="arrival_cv")
    cached = args.cached_tokens
    return Workload.of(args.rate, args.input, args.output, cached_tokens=cached, arrival_cv=args.arrival_cv)
