"""What each optimisation buys, on one GPU, offline and served. Run: python3 benchmarks/h200_ablate.py OUT --part PART

    combinations  no cache + naive, cache + naive, cache + efficient without and with graphs    four groups, one by one
    batching      static, dynamic, continuous whole, continuous chunked    the groups mixed, answers of 50 to 150 %
    full          one server, the four groups over HTTP, the whole report of `bench serve`

Each arm is a process of its own with random weights (speed only). Few requests, and shorter answers of the long groups,
where a step without a cache computes a long sequence anew. A step's time is split by what bounds it; plan's prediction
(on an H200 fitted to the kept records of `single` and `short-short`, which no arm runs) stands beside what was
measured, and each change is attributed. Figures go to OUT/PART.json, tables to OUT/PART.md, reports to OUT/full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from steelyard.bench.ablate import ACCOUNTS
from steelyard.bench.arms import KNOBS, SETS
from steelyard.bench.expect import Load, expected
from steelyard.bench.workload import GROUPS
from steelyard.cli.ablate import served
from steelyard.cli.options import add_engine_arguments, engine_config
from steelyard.llm import LLM
from steelyard.perf.arm_report import arms_table, changes, changes_tables, parts, phases, predicted_s, why_unpredicted
from steelyard.perf.environment import environment
from steelyard.perf.throughput import record_steps, roofline_of, run_case
from steelyard.perf.workloads import Case, write_config
from steelyard.plan.calibration import Calibration, default_calibration
from steelyard.plan.fit import fit
from steelyard.plan.records import read_records
from steelyard.plan.roofline import Roofline
from steelyard.wire.messages import Finished

Json = dict[str, Any]
RECORDS = Path(__file__).parent / "results" / "h200-steps.jsonl"
SHOWN = ("single", "short-short")
COUNTS: Mapping[str, Mapping[str, int]] = {
    "combinations": {"short-short": 16, "long-short": 1, "short-long": 4, "long-long": 1},
    "batching": {"short-short": 64, "long-short": 24, "short-long": 64, "long-long": 24},
}
CUT = {"short-long": 4, "long-long": 4}
"""Of `combinations`: answers are so many times shorter than the group's."""
NO_GRAPHS = ("cache, efficient attention, no graphs", ("--enforce-eager",))
"""Between naive attention, which cannot be captured, and the engine as it is: parts attention from launches."""
LIMIT_S = 240.0
MOST_TOKENS = 6144
"""Of a request: 4096 and 150 % of 1024, in whole blocks; also a step's budget where prompts are whole."""
ROWS = 64
SPREAD = 0.5


def group_cases(part: str, divisor: int) -> list[Case]:
    """The requests of a part. The mixed case draws answers evenly around their length, from a fixed seed."""
    lens = {name: (max(i // divisor, 4), max(o // divisor, 4)) for name, (i, o) in GROUPS.items()}
    counts = COUNTS[part]
    if part == "combinations":
        found = {name: (lens[name][0], max(lens[name][1] // CUT.get(name, 1), 4)) for name in GROUPS}
        return [Case(f"{name} {i}/{o}", ((i, o),) * counts[name]) for name, (i, o) in found.items()]
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
    recorder, roofline, ended = record_steps(llm), roofline_of(llm, args.name), note_ends(llm)
    calibration = calibrated(roofline, args.name) if roofline is not None else None
    rows = []
    for case in group_cases(args.part, args.divisor):
        run_case(llm, Case(case.name, tuple((i, min(o, 4)) for i, o in case.lens)), recorder)
        held = llm.engine.scheduler.held_slots
        ended.clear()
        run = run_case(llm, case, recorder)
        steps, settings = list(recorder.steps), {k: v for k, v in llm.engine.options.config.items() if k != "model"}
        row = {
            "case": case.name,
            "requests": len(case.lens),
            "seconds": run.seconds,
            "out_tok_s": run.output_tokens / run.seconds,
            "steps": len(steps),
            "graphed": run.graphed,
            "ids_sha256": run.ids_sha256,
            "held_slots": llm.engine.scheduler.held_slots - held,
            "kv_blocks_peak_since_start": llm.engine.cache.most_active(),
            **phases(steps),
            "parts_s": parts(steps, roofline, run.seconds),
            **accounts(ended),
            "unpredicted": why_unpredicted(settings),
            "predicted_s": None,
            "config": settings,
        }
        if roofline is not None and calibration is not None:
            if not row["unpredicted"]:
                row["predicted_s"] = predicted_s(steps, roofline, calibration)
            row["expected"] = ratios(case, (roofline, calibration))
        rows.append(row)
        print(f"  {case.name}: {run.seconds:.2f} s", file=sys.stderr, flush=True)
    return rows


def note_ends(llm: LLM) -> list[Finished]:
    """What the engine says at the end of each request from now on, its ledger in it."""
    found: list[Finished] = []
    step = llm.engine.step

    def noting() -> list[Any]:
        messages = step()
        found.extend(m for m in messages if isinstance(m, Finished))
        return messages

    llm.engine.step = noting
    return found


def accounts(ended: Sequence[Finished]) -> Json:
    """Milliseconds of a mean request, in all and by the accounts of `steelyard ablate`."""
    states = {s: fmean(f.ledger.get(s, 0) for f in ended) / 1e6 for s in {s for f in ended for s in f.ledger}}
    by_account = {name: sum(states.get(s, 0.0) for s in own) for name, own in ACCOUNTS.items()}
    whole = sum(states.values())
    return {"request_ms": whole, "accounts_ms": by_account | {"in no account": whole - sum(by_account.values())}}


def calibrated(roofline: Roofline, name: str) -> Calibration:
    """Fitted to the kept records of the model where this is their device, else the plan's default."""
    wanted = {f"{name} {kind}" for kind in SHOWN}
    records = [r for r in read_records(RECORDS) if " ".join(r.workload.split()[:2]) in wanted]
    if not records or "H200" not in roofline.setup.device.name:
        return default_calibration(roofline)
    return fit(roofline, records)


def ratios(case: Case, model: tuple[Roofline, Calibration]) -> dict[str, float]:
    """What plan expects a decode step to be multiplied by, by the knobs that it has a term for."""
    rows = min(len(case.lens), ROWS)
    load = Load(fmean(i for i, _ in case.lens), fmean(o for _, o in case.lens), rows)
    found = {knob: expected(knob, model, load) for knob in ("kv-cache", "attention")}
    return {knob: e.ratio for knob, e in found.items() if e is not None}


def run_part(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Every arm of the set in a process of its own; an arm that fails is a row that says why."""
    arms, rows = SETS[args.part], dict[str, Any]()
    own = list(arms.arms)
    if args.part == "combinations":
        own.insert(len(own) - 1, NO_GRAPHS)
    for name, flags in own:
        print(f"{args.part}: {name}", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, str(args.out), "--part", args.part, "--model", args.model]
        command += ["--name", args.name, "--divisor", str(args.divisor), "--arm", "--", *words, *arms.both, *flags]
        began = time.monotonic()
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
            rows[name] = json.loads(done.stdout.strip().splitlines()[-1])
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            rows[name] = {"failed": str(error)[-300:]}
        print(f"  {time.monotonic() - began:.0f} s with its start", file=sys.stderr, flush=True)
        save(args, rows)


async def run_full(args: argparse.Namespace, words: Sequence[str]) -> int:
    """A server, and `bench serve` over the four groups; the run's raw files end in one archive."""
    folder = args.out / "full"
    async with served(args.model, [*words, "--skip-tokenizer-init"]) as url:
        vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
        command = [sys.executable, "-m", "steelyard.cli.main", "bench", "serve", "--base-url", url, "--name", args.name]
        command += ["--group", "all", "--group-divisor", str(args.divisor), "--vocab-size", str(min(vocab, 30000))]
        command += ["--num-prompts", str(args.requests), "--max-concurrency", str(args.slots)]
        command += ["--client-processes", "4", "--prompt-kind", "ids", "--warmup", "64"]
        command += ["--save-result", "--result-dir", str(folder)]
        if args.device == "cuda":
            command += ["--plan-model", args.name, "--plan-device", "H200"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    print(done.stdout[-4000:])
    if not folder.is_dir():
        return done.returncode or 1
    raw = [p for p in folder.iterdir() if p.name.endswith((".records.jsonl", ".vllm.json", ".csv"))]
    with tarfile.open(folder / f"{args.name}.raw.tar.gz", "w:gz") as archive:
        for path in raw:
            archive.add(path, path.name)
    for path in raw:
        path.unlink()
    return done.returncode


def save(args: argparse.Namespace, rows: Json) -> None:
    """OUT/PART.json and OUT/PART.md, written after every arm."""
    args.out.mkdir(parents=True, exist_ok=True)
    found = changes({name: own for name, own in rows.items() if isinstance(own, list)})
    for row in found:
        knob = changed(*(rows[row[end]][0]["config"] for end in ("from", "to")))
        of_case = next(r for r in rows[row["to"]] if r["case"] == row["case"])
        row["expected_ratio"] = of_case.get("expected", {}).get(knob)
    whole = {"part": args.part, "model": args.name, "weights": "dummy: speed only", "environment": environment()}
    whole |= {"arms": rows, "changes": found}
    (args.out / f"{args.part}.json").write_text(json.dumps(whole, indent=1) + "\n")
    lines = [f"# {args.part}, {args.name}", "", "Random weights: speed only.", "", *arms_table(rows)]
    lines += ["", "What each change moved, seconds of the whole run:", "", *changes_tables(found)]
    (args.out / f"{args.part}.md").write_text("\n".join(lines) + "\n")


def changed(before: Json, after: Json) -> str:
    """The first knob whose setting differs; "" if none does."""
    return next((k.name for k in KNOBS.values() if before.get(k.read_back) != after.get(k.read_back)), "")


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
    most = max(MOST_TOKENS // args.divisor, 64)
    words += ["--load-format", "dummy", "--device", args.device, "--max-model-len", str(most)]
    if args.device == "cuda":
        words += ["--gpu-memory-utilization", "0.75"]
    with TemporaryDirectory() as folder:
        args.model = args.model or str(write_config(args.name, Path(folder)))
        if args.part == "full":
            return asyncio.run(run_full(args, words))
        run_part(args, [*words, "--max-num-seqs", str(ROWS)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
