"""`steelyard ablate`: start two servers that differ in one flag, in turns, and compare what clients see."""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

from steelyard.cli.bench_serve import add_load_arguments, add_target_arguments, find_server, make_work
from steelyard.errors import InvalidRequest, StartError

if TYPE_CHECKING:
    from steelyard.bench.ablate import Comparison, Knob
    from steelyard.bench.session import RunResult

_ADDRESS = re.compile(r"^steelyard: .* on (http://\S+)$")
START_LIMIT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("serve_model", metavar="MODEL", help="as for steelyard serve")
    add("--knob", action="append", required=True, metavar="NAME", help="what to change; several: one after the other")
    add("--pairs", type=int, default=3, metavar="N", help="runs of each arm, interleaved (default: 3)")
    add("--serve-args", default="", metavar="FLAGS", help="for both arms, such as '--max-num-seqs 8'")
    add("--quality", action="store_true", help="judge B's answers against A's beside the speed")
    add("--json", action="store_true")
    add_target_arguments(parser)
    add_load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every knob and print one table each."""
    import json
    from dataclasses import asdict

    import uvloop

    from steelyard.bench.ablate import knobs_named, to_markdown

    knobs = knobs_named(args.knob)
    for knob in knobs:
        _check_flags(knob)
    found, quality = uvloop.run(_Ablation(args).run(knobs))
    print(json.dumps([asdict(c) for c in found]) if args.json else to_markdown(found, quality))
    return 0


def _check_flags(knob: Knob) -> None:
    """Raises InvalidRequest if this version of the server has no such flag: nothing is started then."""
    from steelyard.cli import serve

    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    known = {word for action in parser._actions for word in action.option_strings}
    missing = [word for word in (*knob.a, *knob.b) if word.startswith("--") and word not in known]
    if missing:
        raise InvalidRequest(f"--knob {knob.name}: this server has no {missing[0]}", param="knob")


class _Ablation:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    async def run(self, knobs: Sequence[Knob]) -> tuple[list[Comparison], dict[str, str]]:
        from steelyard.bench.ablate import compare, interleaved

        found, quality = [], {}
        for knob in knobs:
            reports: dict[str, list[Any]] = {"A": [], "B": []}
            for pair, arm in interleaved(self._args.pairs):
                print(f"{knob.name}: pair {pair + 1} of {self._args.pairs}, arm {arm}", file=sys.stderr, flush=True)
                result = await self._one(knob.a if arm == "A" else knob.b, pair)
                reports[arm].append(result.report)
            found.append(compare(knob, reports["A"], reports["B"]))
            if self._args.quality:
                quality[knob.name] = await self._quality(knob)
        return found, quality

    async def _one(self, flags: Sequence[str], pair: int) -> RunResult:
        """A fresh server, so that no arm inherits a cache; pairs share their seed."""
        from steelyard.bench.session import RunOptions, run_session

        async with served(self._args.serve_model, [*self._args.serve_args.split(), *flags]) as url:
            args = copy(self._args)
            args.base_url = url
            server = await find_server(args)
            return await run_session(server, make_work(args, seed=args.seed + pair), RunOptions())

    async def _quality(self, knob: Knob) -> str:
        from steelyard.cli.quality import judge_servers

        shared = self._args.serve_args.split()
        if "dummy" in shared:
            return "speed only: random weights say nothing of answers"
        model = self._args.serve_model
        async with served(model, [*shared, *knob.a]) as a, served(model, [*shared, *knob.b]) as b:
            verdict, _, _ = await judge_servers(a, b)
        return f"{verdict.outcome}: {'; '.join(verdict.reasons)}"


@asynccontextmanager
async def served(model: str, flags: Sequence[str]) -> AsyncIterator[str]:
    """A `steelyard serve` of its own on a free port; yields its address. Raises StartError with its last words."""
    command = [sys.executable, "-m", "steelyard.cli.main", "serve", model, "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield await asyncio.wait_for(asyncio.to_thread(_address, process), START_LIMIT_S)
    finally:
        process.terminate()
        await asyncio.to_thread(process.communicate)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        match = _ADDRESS.match(line.strip())
        if match:
            return match[1]
    words = process.stderr.read().strip().splitlines()
    raise StartError(f"the server did not start: {words[-1] if words else 'it said nothing'}")
