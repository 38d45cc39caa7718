"""What each optimisation buys, on one GPU, offline and served. Run: python3 benchmarks/h200_ablate.py OUT --part PART

    combinations  no cache + naive, cache + naive, cache + efficient      the four groups, one by one, few requests
    batching      static, dynamic, continuous whole, continuous chunked   the four groups mixed, answers of 50 to 150 %
    full          one server, the four groups over HTTP, the whole report of `bench serve`

Each arm is a process of its own with random weights (speed only), each part fits in nine minutes. A step's time is
split by what bounds it: floor where arithmetic or memory is the longer part, what is above the floor, and the gap
before it; what of the wall time is in no step is the residual. Figures go to OUT/PART.json, tables to OUT/PART.md.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steelyard.bench.arms import SETS
from steelyard.bench.workload import GROUPS
from steelyard.cli.ablate import served
from steelyard.cli.options import add_engine_arguments, engine_config
from steelyard.llm import LLM
from steelyard.perf.environment import environment
from steelyard.perf.throughput import record_steps, roofline_of, run_case
from steelyard.perf.workloads import Case, write_config
from steelyard.plan.costs import Chunk
from steelyard.plan.roofline import Roofline

Json = dict[str, Any]
COUNTS: Mapping[str, Mapping[str, int]] = {
    "combinations": {"short-short": 16, "long-short": 4, "short-long": 16, "long-long": 2},
    "batching": {"short-short": 64, "long-short": 24, "short-long": 64, "long-long": 24},
}
MOST_TOKENS = 6144
"""Of a request: 4096 and 150 % of 1024, in whole blocks; also a step's budget where prompts are whole."""
ROWS = 64
SPREAD = 0.5


def group_cases(part: str, divisor: int) -> list[Case]:
    """The requests of a part. The mixed case draws answers evenly around their length, from a fixed seed."""
    lens = {name: (max(i // divisor, 4), max(o // divisor, 4)) for name, (i, o) in GROUPS.items()}
    counts = COUNTS[part]
    if part == "combinations":
        return [Case(name, (lens[name],) * counts[name]) for name in GROUPS]
    rng = random.Random("answers")
    mixed = [
        (lens[name][0], max(1, round(lens[name][1] * rng.uniform(1 - SPREAD, 1 + SPREAD))))
        for name in GROUPS
        for _ in range(counts[name])
    ]
    rng.shuffle(mixed)
    return [Case("four groups mixed", tuple(mixed))]


def run_arm(args: argparse.Namespace, words: Sequence[str]) -> list[Json]:
    """In this process: one engine, every case twice (the first warms up), the second measured."""
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    config = replace(engine_config(parser.parse_args([args.model, *words])), skip_tokenizer_init=True)
    llm = LLM.from_config(config)
    recorder, roofline = record_steps(llm), roofline_of(llm, args.name)
    rows = []
    for case in group_cases(args.part, args.divisor):
        run_case(llm, Case(case.name, tuple((i, min(o, 4)) for i, o in case.lens)), recorder)
        held = llm.engine.scheduler.held_slots
        run = run_case(llm, case, recorder)
        steps = list(recorder.steps)
        rows.append(
            {
                "case": case.name,
                "requests": len(case.lens),
                "seconds": run.seconds,
                "out_tok_s": run.output_tokens / run.seconds,
                "steps": len(steps),
                "ids_sha256": run.ids_sha256,
                "held_slots": llm.engine.scheduler.held_slots - held,
                "kv_blocks_peak": llm.engine.cache.most_active(),
                **phases(steps),
                "parts_s": parts(steps, roofline, run.seconds),
                "config": {k: v for k, v in llm.engine.options.config.items() if k != "model"},
            }
        )
        print(f"  {case.name}: {run.seconds:.2f} s", file=sys.stderr, flush=True)
    return rows


def phases(steps: Sequence[Json]) -> Json:
    """Prefill and decode apart: the first step's time a prompt token, and the middle later step's.

    Without a KV cache every step has prefill tokens; what begins a request is told from what continues it by order.
    """
    spans = [(s["device_ns"] + s["gap_ns"]) / 1e6 for s in steps]
    later = sorted(spans[len(spans) // 2 :])
    return {"first_step_ms": spans[0], "decode_step_ms": later[len(later) // 2]}


def parts(steps: Sequence[Json], roofline: Roofline | None, seconds: float) -> Json:
    """Seconds by what bounds them; they and the residual sum to the wall time."""
    found = {"compute floor": 0.0, "memory floor": 0.0, "above the floor": 0.0, "gaps": 0.0}
    for i, step in enumerate(steps):
        device_s = step["device_ns"] / 1e9
        found["gaps"] += step["gap_ns"] / 1e9 if i else 0.0
        floor_s, name = 0.0, "above the floor"
        if roofline is not None:
            chunks = chunks_of(step)
            floor_s = min(roofline.floor(chunks, routing="fewest").seconds, device_s)
            more_compute = roofline.mfu(chunks, device_s) >= roofline.mbu(chunks, device_s)
            name = "compute floor" if more_compute else "memory floor"
            found[name] += floor_s
        found["above the floor"] += device_s - floor_s
    return found | {"residual": seconds - sum(found.values())}


def chunks_of(step: Json) -> tuple[Chunk, ...]:
    """A recorded step as the plan knows it, rows of a kind taken to be alike."""
    found = []
    if step["decode_rows"]:
        found.append(Chunk(1, max(step["context_sum"] // step["decode_rows"], 1), step["decode_rows"]))
    if step.get("prefill_rows"):
        rows = step["prefill_rows"]
        new = max(step["prefill_tokens"] // rows, 1)
        found.append(Chunk(new, max(step["prefill_context_sum"] // rows, new), rows))
    return tuple(found)


def run_part(args: argparse.Namespace, words: Sequence[str]) -> Json:
    """Every arm of the set in a process of its own; an arm that fails is a row that says why."""
    arms = SETS[args.part]
    rows: Json = {}
    for name, own in arms.arms:
        print(f"{args.part}: {name}", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, str(args.out), "--part", args.part, "--model", args.model]
        command += ["--name", args.name, "--divisor", str(args.divisor), "--arm", "--", *words, *arms.both, *own]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        sys.stderr.write(done.stderr[-2000:])
        last = done.stdout.strip().splitlines()
        ok = done.returncode == 0 and bool(last)
        rows[name] = json.loads(last[-1]) if ok else {"failed": done.stderr[-500:]}
        print(f"  {time.monotonic() - began:.0f} s with its start", file=sys.stderr, flush=True)
        save(args, {"arms": rows})
    return {"arms": rows}


async def run_full(args: argparse.Namespace, words: Sequence[str]) -> Json:
    """A server, and `bench serve` over the four groups with everything kept."""
    async with served(args.model, [*words, "--skip-tokenizer-init"]) as url:
        vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
        command = [sys.executable, "-m", "steelyard.cli.main", "bench", "serve", "--base-url", url, "--name", args.name]
        command += ["--group", "all", "--group-divisor", str(args.divisor), "--vocab-size", str(min(vocab, 30000))]
        command += [
            "--num-prompts",
            str(args.requests),
            "--max-concurrency",
            str(args.slots),
            "--client-processes",
            "4",
        ]
        command += ["--prompt-kind", "ids", "--warmup", "64", "--save-result", "--result-dir", str(args.out / "full")]
        if args.device == "cuda":
            command += ["--plan-model", args.name, "--plan-device", "H200"]
        done = subprocess.run(command, capture_output=True, text=True)
    return {"status": done.returncode, "said": done.stdout[-4000:], "errors": done.stderr[-1000:]}


def save(args: argparse.Namespace, result: Json) -> None:
    """OUT/PART.json and OUT/PART.md, written after every arm."""
    args.out.mkdir(parents=True, exist_ok=True)
    whole = {"part": args.part, "model": args.name, "weights": "dummy: speed only", "environment": environment()}
    (args.out / f"{args.part}.json").write_text(json.dumps(whole | result, indent=1) + "\n")
    (args.out / f"{args.part}.md").write_text(markdown(args, result))


def markdown(args: argparse.Namespace, result: Json) -> str:
    lines = [f"# {args.part}, {args.name}", "", "Random weights: speed only.", ""]
    if "arms" not in result:
        return "\n".join([*lines, result["said"]])
    names = ("compute floor", "memory floor", "above the floor", "gaps", "residual")
    lines.append(
        f"| case | arm | s | out tok/s | first step, ms | decode step, ms | held slots | {' | '.join(names)} |"
    )
    lines.append("|" + " --- |" * (7 + len(names)))
    for arm, rows in result["arms"].items():
        if isinstance(rows, dict):
            lines.append(f"| | {arm} | failed |")
            continue
        for r in rows:
            cells = [f"{r['seconds']:.2f}", f"{r['out_tok_s']:,.0f}", f"{r['first_step_ms']:.2f}"]
            cells += [f"{r['decode_step_ms']:.2f}", str(r["held_slots"]), *(f"{r['parts_s'][n]:.2f}" for n in names)]
            lines.append(f"| {r['case']} | {arm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", choices=(*COUNTS, "full"), required=True)
    parser.add_argument("--model", default="", help="a directory (default: the config named by --name)")
    parser.add_argument("--name", default="qwen3-0.6b", help="a config of the workloads' file, and plan's model")
    parser.add_argument("--divisor", type=int, default=1, help="shorten the groups, for a try on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, default=64, help="of each group, where served")
    parser.add_argument("--slots", type=int, default=64, help="requests at once, where served")
    parser.add_argument("--arm", action="store_true", help=argparse.SUPPRESS)
    args, words = parser.parse_known_args()
    words = [w for w in words if w != "--"]
    if args.arm:
        print(json.dumps(run_arm(args, words)))
        return 0
    if not args.model:
        args.model = str(write_config(args.name, args.out / "model"))
    most = max(MOST_TOKENS // args.divisor, 64)
    words += ["--load-format", "dummy", "--device", args.device, "--max-model-len", str(most)]
    if args.part != "full":
        words += ["--max-num-seqs", str(ROWS)]
        save(args, run_part(args, words))
        return 0
    import asyncio

    save(args, asyncio.run(run_full(args, words)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
