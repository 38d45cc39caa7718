"""The topics of `steelyard plan`: compare, tune, cache, waste (fit has plan_fit.py). Flags and layout."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from steelyard.cli.plan_text import table
from steelyard.cli.values import above, real, whole
from steelyard.errors import StartError
from steelyard.plan.device import find_device
from steelyard.plan.explain import CONSTRAINTS
from steelyard.plan.formats import UNSERVED
from steelyard.plan.fragmentation import (
    POLICIES,
    STORY,
    STORY_CAPACITY,
    BlockChoice,
    Event,
    Replay,
    block_choices,
    replay,
    sample_lengths,
)
from steelyard.plan.memory import GIB
from steelyard.plan.models import PlannedModel
from steelyard.plan.planner import Options, Plan, make_plan
from steelyard.plan.prefix import Economics, History, break_even_hit_share
from steelyard.plan.report import to_json
from steelyard.plan.roofline import Roofline
from steelyard.plan.tune import Tuned

_INTS = {
    "tp": "tp",
    "block-size": "block_size",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
}
_NAMES = {"dtype": "dtype", "kv-cache-dtype": "kv_cache_dtype"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that only topics read."""
    group = parser.add_argument_group("topics")
    add = group.add_argument
    add(
        "--to",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="compare: an alternative, such as device=H100",
    )
    add("--network", type=above(0), metavar="GB/S", help="cache: bandwidth to another machine's cache")
    add("--history", type=whole(1), metavar="TOKENS", help="cache: of a conversation (default: 32000)")
    add("--remove", type=whole(0), metavar="TOKENS", help="cache: deleted from its middle (default: half of it)")
    add("--tail", type=whole(0), metavar="TOKENS", help="cache: behind what is deleted (default: a quarter)")
    add("--summary", type=whole(0), metavar="TOKENS", help="cache: put in its place (default: 500)")
    add("--turns", type=whole(1), metavar="N", help="cache: still to come (default: 20)")
    add(
        "--hit-rate",
        type=real(0, 1),
        metavar="SHARE",
        help="cache: a turn finds its prefix (default: 1)",
    )
    add("--held-out", metavar="FILE", help="fit: measured steps to predict (default: those fitted)")


def compare(args: argparse.Namespace, model: PlannedModel, options: Options) -> int:
    """The plan of the flags beside that of each --to. Raises StartError for a --to that cannot be read."""
    if not args.to:
        raise StartError("compare needs an alternative: --to device=H100, --to dtype=fp8,tp=2, ...", param="to")
    cases = [("as given", options)] + [(text, _changed(options, text)) for text in args.to]
    plans = [(name, make_plan(model, case)) for name, case in cases]
    if args.json:
        print(json.dumps({name: to_json(plan) for name, plan in plans}, indent=2, allow_nan=False))
        return 0
    lines = [_compared(plan) for _, plan in plans]
    labels = list(lines[0])
    rows = [[label, *(line.get(label, "-") for line in lines)] for label in labels]
    notes = {f"Note: {note}." for _, plan in plans for note in plan.notes}
    names = {plan.setup.weights.name for _, plan in plans} & UNSERVED
    notes |= {f"Note: `steelyard serve` has no {name} weights: those columns are of another server." for name in names}
    print("\n".join([*table(["", *(name for name, _ in plans)], rows), *sorted(notes)]))
    return 0


def _changed(options: Options, text: str) -> Options:
    changed: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key == "device" and value:
            changed["device"] = find_device(value)
        elif key in _NAMES and value:
            changed[_NAMES[key]] = value
        elif key == "context" and value.isdigit():
            changed["contexts"] = (int(value),)
        elif key in _INTS and value.isdigit():
            changed[_INTS[key]] = int(value)
        else:
            known = ", ".join(("device", "context", *_NAMES, *_INTS))
            raise StartError(f"--to {text}: expected KEY=VALUE with a key of {known}, got {part!r}", param="to")
    return replace(options, **changed)


def _compared(plan: Plan) -> dict[str, str]:
    found = {
        "device": f"{plan.setup.tp} x {plan.setup.device.name}",
        "weights GB a device": f"{plan.budget.weights_bytes / 1e9:.2f}",
        "KV pool GiB": f"{plan.budget.kv_bytes / GIB:.2f}",
        "context": f"{plan.context_len:,}",
        "sequences of it": f"{plan.max_sequences:,}",
        "longest context": f"{plan.max_context:,}",
    }
    several = len({row.context_len for row in plan.decodes}) > 1
    for row in plan.decodes:
        name = f"decode {row.batch} x {row.context_len}" if several else f"decode {row.batch} rows"
        found[f"{name} floor ms"] = f"{row.floor.ms:.3f}"
        found[f"{name} estimate ms"] = f"{row.estimate.ms:.3f}"
    for row in plan.prefills:
        found[f"prefill {row.num_tokens} estimate ms"] = f"{row.estimate.ms:.1f}"
    if plan.capacity is not None:
        seen = plan.capacity
        found["requests/s a replica"] = f"{seen.replica_capacity:.3g}"
        found["replicas"] = str(seen.replicas)
        found["devices"] = str(seen.replicas * plan.setup.tp)
        found["TTFT p90 ms"] = f"{seen.latency.ttft_p90_s * 1e3:.1f}"
        found["TPOT ms"] = f"{seen.latency.tpot_s * 1e3:.2f}"
        found["worst gap ms"] = f"{seen.point.full_step_s * 1e3:.1f}"
        found["binds"] = CONSTRAINTS[seen.constraints[0].name]
        if plan.price is not None:
            found["per million in / out"] = f"{plan.price.per_million_input:.4g} / {plan.price.per_million_output:.4g}"
    return found


def show_tuned(args: argparse.Namespace, tuned: Tuned) -> int:
    """Each parameter's value, reason and trade, then the command."""
    if args.json:
        found = {a.parameter: {"value": a.value, "reason": a.reason, "trade": a.trade} for a in tuned.advice}
        print(json.dumps({"advice": found, "command": tuned.command or None, "plan": to_json(tuned.plan)}, indent=2))
        return 0
    for line in tuned.advice:
        print(f"{line.parameter} = {line.value}\n    why    {line.reason}\n    trade  {line.trade}")
    found_capacity = tuned.plan.capacity
    assert found_capacity is not None
    replicas, tp = found_capacity.replicas, tuned.plan.setup.tp
    many = f"{replicas} replica{'s' * (replicas > 1)}"
    print(
        f"\nA replica serves {found_capacity.replica_capacity:.3g} requests/s within the targets: the load of "
        f"{found_capacity.load.rate:g} needs {many}."
    )
    if (cost := tuned.plan.price) is not None:
        print(f"A million tokens cost {cost.per_million_input:.4g} as input, {cost.per_million_output:.4g} as output.")
    if tuned.command:
        print(f"Start {'each' if replicas > 1 else 'it'} with\n\n    {tuned.command}\n")
        if tuned.plan.model.source.startswith("preset") and "/" not in args.words[-1]:
            print("with the directory or hub id of the checkpoint in place of the preset's name.")
    else:
        print(f"`steelyard serve` runs on one device, and a replica needs {tp} of these: no command for it.")
    return 0


def show_cache(args: argparse.Namespace, plan: Plan) -> int:
    """Reuse, ways to bring KV back, compaction, and with a load the hit share from which a cache pays."""
    cache = Economics(Roofline(plan.setup), plan.calibration)
    if args.network is not None and not 0.0 < args.network < float("inf"):
        raise StartError(f"--network must be a number above 0 GB/s, got {args.network:g}", param="network")
    network = None if args.network is None else args.network * 1e9
    lengths = (512, 2048, 8192, 32768)
    backs = [cache.restore(n, network) for n in lengths]
    case = _history(args)
    deleted = cache.compaction(case)
    pays = None
    if plan.service is not None and plan.options.load is not None:
        pays = break_even_hit_share(plan.service, plan.options.load, plan.options.slo, 0.2)
    if args.json:
        restore = [asdict(b) | {"best": b.best, "break_even_gb_per_s": b.break_even_bandwidth / 1e9} for b in backs]
        for row in restore:
            row["transfer_s"] = row["transfer_s"] if network else None
        found = {"restore": restore, "compaction": _finite(asdict(deleted)), "break_even_hit_share": pays}
        print(json.dumps(found, indent=2, allow_nan=False))
        return 0
    header = ["tokens cached", "GiB", "compute ms", "swap in ms", "transfer ms", "best", "break-even GB/s"]
    rows = [
        [
            f"{b.num_tokens:,}",
            f"{b.bytes / GIB:.3f}",
            f"{b.recompute_s * 1e3:.1f}",
            f"{b.swap_s * 1e3:.1f}",
            f"{b.transfer_s * 1e3:.1f}" if network else "-",
            b.best,
            f"{b.break_even_bandwidth / 1e9:.2f}",
        ]
        for b in backs
    ]
    print("\n".join(["KV that was computed before: what having it back costs", *table(header, rows), ""]))
    print(
        f"Deleting {case.removed_len:,} of {case.context_len:,} tokens of history for {case.summary_len:,} of summary"
    )
    print(f"  costs once    {deleted.once_s * 1e3:.1f} ms: what lies behind is computed again, the prefix is broken")
    print(f"  saves a turn  {deleted.saved_per_turn_s * 1e3:.2f} ms, and {deleted.freed_bytes / GIB:.2f} GiB of KV")
    verdict = "worth it" if deleted.worth_it else "not worth it"
    if deleted.saved_per_turn_s > 0.0:
        print(f"  pays after    {deleted.break_even_turns:.1f} turns; {case.turns} are to come: {verdict}")
    else:
        print("  pays          never: every window is as full after it as before")
    if plan.options.load is not None:
        share = "never" if pays is None else f"from {pays:.1%} of prompt tokens hit on"
        print(f"\nA cache that holds 20 % of the pool pays {share}.")
    return 0


def _history(args: argparse.Namespace) -> History:
    """The conversation of the flags; half of it is deleted and a quarter lies behind that where they do not say."""
    length = 32_000 if args.history is None else args.history
    removed = length // 2 if args.remove is None else args.remove
    tail = length // 4 if args.tail is None else args.tail
    summary = 500 if args.summary is None else args.summary
    turns = 20 if args.turns is None else args.turns
    return History(length, removed, tail, summary, turns, hit_rate=1.0 if args.hit_rate is None else args.hit_rate)


def show_waste(args: argparse.Namespace, plan: Plan) -> int:
    """The story, the four policies on sampled lengths, and block sizes."""
    shape, block = plan.model.shape, plan.options.block_size
    mean_in, mean_out = args.input or 161, args.output or 338
    max_len = min(args.context[0] if args.context else 2048, shape.max_position)
    lengths = sample_lengths(400, mean_in, mean_out, max_len=max_len)
    each = plan.setup.shape.kv_bytes_per_token(plan.setup.kv_dtype_bytes, plan.setup.tp)
    slots = max(min(plan.budget.kv_bytes // each, 8 * max_len), 2 * max_len)
    uses = [Replay(lengths, slots, max_len, block).run(p) for p in POLICIES]
    kinds = ("filled", "reserved", "internal", "external", "idle")
    run_bytes = shape.layers[0].attention.kv_elements_per_token(plan.setup.tp) * plan.setup.kv_dtype_bytes
    blocks = block_choices([p + o for p, o in lengths], run_bytes)
    story = replay(STORY_CAPACITY, STORY)
    if args.json:
        policies = {u.policy: {k: u.share(k) for k in kinds} | {"mean_running": u.mean_running} for u in uses}
        found = {"slots": slots, "policies": policies, "block_sizes": [asdict(b) for b in blocks]}
        print(json.dumps(found | {"story": [asdict(e) for e in story]}, indent=2))
        return 0
    _print_story(story)
    print(f"\n{len(lengths)} requests of {mean_in:,} + {mean_out:,} tokens on average in {slots:,} slots")
    header = ["policy", *kinds, "running", "steps", "preempted"]
    rows = [
        [
            u.policy,
            *(f"{u.share(k):.1%}" for k in kinds),
            f"{u.mean_running:.1f}",
            f"{u.total_steps:,}",
            f"{u.num_preempted}",
        ]
        for u in uses
    ]
    print("\n".join(table(header, rows)))
    _print_blocks(blocks)
    return 0


def _print_story(story: list[Event]) -> None:
    print(f"First fit over {STORY_CAPACITY} slots")
    for event in story:
        holes = ", ".join(f"{size} at {start}" for start, size in event.holes)
        what = "FAILS" if event.failed else ("" if event.start is None else f"gets slot {event.start}")
        print(f"  {event.text:<14} {what:<13} free {event.num_free:>3} in holes of {holes}")


def _print_blocks(blocks: list[BlockChoice]) -> None:
    header = ["tokens", "waste a sequence", "of the pool", "table entries", "prefix lost", "KiB in one run"]
    rows = [
        [
            f"{b.block_size}",
            f"{b.waste_tokens:.1f}",
            f"{b.waste_share:.2%}",
            f"{b.table_entries}",
            f"{b.hit_loss:.1f}",
            f"{b.run_bytes / 1024:.1f}",
        ]
        for b in blocks
    ]
    print("\n".join(["\nBlock size, for sequences of these lengths", *table(header, rows)]))


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {k: v if v < float("inf") else None for k, v in values.items()}
