"""`steelyard ablate`: start servers that differ in one flag, in turns; compare what clients see and what was spent."""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from steelyard.cli.bench_serve import add_load_arguments, add_request_arguments, find_server, make_work
from steelyard.cli.parser import Parser
from steelyard.cli.values import new_folder, together, whole
from steelyard.errors import InvalidRequest, StartError

if TYPE_CHECKING:
    from steelyard.bench.ablate import Comparison
    from steelyard.bench.ablate_text import SetResult
    from steelyard.bench.arms import ArmSet, Knob
    from steelyard.bench.expect import Expected
    from steelyard.core.verdict import Verdict

_ADDRESS = re.compile(r"^steelyard: .* on (http://\S+)$")
START_LIMIT_S = 600.0
RANDOM_WEIGHTS = "speed only: random weights say nothing of answers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from steelyard.bench.arms import KNOBS, SETS

    add = parser.add_argument
    add("serve_model", metavar="MODEL", help="as for steelyard serve")
    add(
        "--knob",
        action="append",
        default=[],
        metavar="NAME",
        help=f"what to change: {', '.join(KNOBS)}, or all; several: one by one",
    )
    add("--set", action="append", default=[], metavar="NAME", help=f"several arms in one table: {', '.join(SETS)}")
    add("--pairs", type=whole(1), default=3, metavar="N", help="runs of each arm, interleaved (default: 3)")
    add("--serve-args", default="", metavar="FLAGS", help="for every arm, such as '--max-num-seqs 8'")
    add("--quality", action="store_true", help="judge answers too: B's against A's, a set's against its last arm's")
    add("--quality-tasks", type=whole(1), default=96, metavar="N", help="of --quality")
    add("--plan-model", metavar="MODEL", help="with --plan-device: predict each difference before it is measured")
    add("--plan-device", metavar="DEVICE", help="such as H200, or a .toml file")
    add("--save", type=new_folder, metavar="DIR", help="write ablation.md, .json and .html, and every run's report")
    add("--json", action="store_true", help="print JSON")
    add_request_arguments(parser)
    add_load_arguments(parser)

    parser.set_defaults(model=None, api_key=None)
    parser.epilog = """The first arm of --set combinations computes every sequence anew in each step: that takes hours
without a GPU, and minutes with --group all --group-divisor 64 --num-prompts 2 --max-concurrency 4."""


def run(args: argparse.Namespace) -> int:
    """Measure every knob and set, print a table each, and save where asked."""
    import json

    import uvloop

    from steelyard.bench.ablate_text import knobs_markdown, set_markdown
    from steelyard.bench.arms import KNOBS, knobs_named, sets_named
    from steelyard.cli.ablate_save import as_json, save

    together(args, "plan_model", "plan_device")
    knobs = knobs_named(list(KNOBS) if args.knob == ["all"] else args.knob)
    sets = sets_named(args.set)
    if not knobs and not sets:
        raise InvalidRequest(f"give --knob ({', '.join(KNOBS)}, all) or --set (combinations, batching)", param="knob")
    _check_flags([w for k in knobs for w in (*k.a, *k.b, *k.both)] + [w for s in sets for a in s.arms for w in a[1]])
    ablation = _Ablation(args)
    stopped = False
    try:
        uvloop.run(ablation.run(knobs, sets))
    except KeyboardInterrupt:
        if not ablation.reports:
            raise
        stopped = True
    found, tables = ablation.found, ablation.tables
    if args.save is not None:
        for path in save(args.save, found, tables, ablation.reports):
            print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print(json.dumps(as_json(found, tables)))
    else:
        print("\n".join([*(set_markdown(t) for t in tables), knobs_markdown(found) if found else ""]))
    if stopped:
        num, whole_ones = len(ablation.reports), len(found) + len(tables)
        raise KeyboardInterrupt(f"{num} runs had ended, and {whole_ones} of {len(knobs) + len(sets)} comparisons")
    return 0


def _check_flags(words: Sequence[str]) -> None:
    """Raises InvalidRequest if this version of the server has no such flag: nothing is started then."""
    from steelyard.cli import serve

    parser = Parser()
    serve.add_arguments(parser)
    known = {word for action in parser._actions for word in action.option_strings}
    missing = [word for word in words if word.startswith("--") and word not in known]
    if missing:
        raise InvalidRequest(f"this server has no {missing[0]}", param="knob")


class _Ablation:
    """Runs of all arms, what is complete of them kept as it comes.

    `reports`: every run's, by a name that says knob or set, arm and pair; `found`, `tables`: of knobs and of sets.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.reports: dict[str, Any] = {}
        self.found: list[Comparison] = []
        self.tables: list[SetResult] = []

    async def run(self, knobs: Sequence[Knob], sets: Sequence[ArmSet]) -> None:
        from steelyard.bench.ablate import compare

        for knob in knobs:
            arms = {"A": (*knob.both, *knob.a), "B": (*knob.both, *knob.b)}
            reports = await self._arms(knob.name, arms)
            _, quality = await self._quality(arms, "A")
            judged = replace(compare(knob, *reports), quality=quality)
            self.found.append(replace(judged, expected=self._expected(knob.name, reports[0])))
        for arms_of_set in sets:
            self.tables.append(await self._set(arms_of_set))

    async def _set(self, arms: ArmSet) -> SetResult:
        from steelyard.bench.ablate import compare
        from steelyard.bench.ablate_text import SetResult

        flags = {name: (*arms.both, *own) for name, own in arms.arms}
        reports = await self._arms(arms.name, flags)
        steps = [compare(k, a, b) for k, a, b in zip(arms.knobs(), reports, reports[1:])]
        return SetResult(arms, reports, steps, await self._quality(flags, arms.arms[-1][0]))

    async def _arms(self, title: str, arms: Mapping[str, Sequence[str]]) -> list[list[Any]]:
        """Reports by arm, runs interleaved."""
        from steelyard.bench.ablate import interleaved

        names = list(arms)
        letters = "".join(chr(ord("A") + i) for i in range(len(names)))
        found: list[list[Any]] = [[] for _ in names]
        for pair, letter in interleaved(self._args.pairs, letters):
            at = letters.index(letter)
            print(f"{title}: run {pair + 1} of {self._args.pairs}, {names[at]}", file=sys.stderr, flush=True)
            report = await self._one(arms[names[at]], pair, f"{title}, {names[at]}, run {pair + 1}")
            found[at].append(report)
        return found

    async def _one(self, flags: Sequence[str], pair: int, name: str) -> Any:
        """A fresh server, so that no arm inherits a cache; pairs share their seed."""
        from steelyard.bench.session import RunOptions, run_session

        async with served(self._args.serve_model, [*self._args.serve_args.split(), *flags]) as url:
            args = copy(self._args)
            args.base_url = url
            server = await find_server(args)
            result = await run_session(server, make_work(args, seed=args.seed + pair), RunOptions(name=name))
        if result.stopped:
            raise asyncio.CancelledError
        self.reports[name] = result.report
        return result.report

    async def _quality(self, arms: Mapping[str, Sequence[str]], base_name: str) -> list[Verdict]:
        """What the gate says of each arm against the one named, in their order."""
        from steelyard.bench.ablate_text import SPEED_ONLY
        from steelyard.cli.quality import judge_servers
        from steelyard.core.verdict import Verdict

        shared, model = self._args.serve_args.split(), self._args.serve_model
        if "dummy" in shared or not self._args.quality:
            return [Verdict(RANDOM_WEIGHTS) if "dummy" in shared else SPEED_ONLY] * len(arms)
        found = []
        async with served(model, [*shared, *arms[base_name]]) as base:
            for name, flags in arms.items():
                if name == base_name:
                    found.append(Verdict("the base of the others", judged=name))
                    continue
                print(f"quality: {name} against {base_name}", file=sys.stderr, flush=True)
                async with served(model, [*shared, *flags]) as arm:
                    verdict, _, _ = await judge_servers(base, arm, num_tasks=self._args.quality_tasks)
                found.append(replace(verdict, judged=f"{name} against {base_name}"))
        return found

    def _expected(self, knob: str, reports: Sequence[Any]) -> Expected | None:
        """What plan expects at the rows that really ran; None without a model and a device."""
        from steelyard.bench.expect import Load, expected
        from steelyard.bench.floor import roofline_of
        from steelyard.plan.calibration import default_calibration

        args, server = self._args, reports[0]["summary"].get("server") or {}
        if not (args.plan_model and args.plan_device and server.get("running")):
            return None
        roofline = roofline_of(args.plan_model, args.plan_device)
        work = reports[0]["workload"]
        load = Load(work["mean_input_len"], work["mean_output_len"], max(server["running"]["mean"], 1.0))
        return expected(knob, (roofline, default_calibration(roofline)), load, work["declared_cached"])


@asynccontextmanager
async def served(model: str, flags: Sequence[str]) -> AsyncIterator[str]:
    """A `steelyard serve` of its own on a free port; yields its address. Raises StartError with its last words."""
    command = [sys.executable, "-m", "steelyard.cli.main", "serve", model, "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    drained: list[str] = []
    try:
        yield await asyncio.wait_for(asyncio.to_thread(_address, process, drained), START_LIMIT_S)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


def _address(process: subprocess.Popen[str], words: list[str]) -> str:
    """The address from the server's first words; its log is read on, so that it never waits for a reader."""
    import threading

    assert process.stdout is not None and process.stderr is not None
    log = process.stderr
    reader = threading.Thread(target=lambda: words.extend(log), daemon=True)
    reader.start()
    for line in process.stdout:
        match = _ADDRESS.match(line.strip())
        if match:
            return match[1]
    reader.join(5.0)
    raise StartError(f"the server did not start: {words[-1].strip() if words else 'it said nothing'}")
