"""`steelyard bench sweep`: the curve from one request at a time to past the knee, and the capacity under targets."""

from __future__ import annotations

import argparse
import asyncio
import sys
from copy import copy
from typing import TYPE_CHECKING

from steelyard.cli.bench_serve import Display, find_server, make_work, run_options
from steelyard.cli.bench_serve import add_arguments as add_serve_arguments
from steelyard.cli.values import above, whole
from steelyard.errors import InvalidRequest

if TYPE_CHECKING:
    from steelyard.bench.session import RunResult
    from steelyard.bench.sweep import Capacity, Point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serve_arguments(parser)
    group = parser.add_argument_group("sweep")
    add = group.add_argument
    add(
        "--points",
        type=whole(0),
        default=4,
        metavar="N",
        help="rates between one at a time and saturation (default: 4)",
    )
    add(
        "--saturation",
        type=whole(1),
        default=64,
        metavar="N",
        help="slots of the closed loop that saturates (default: 64)",
    )
    add("--attainment", type=above(0, 1), default=0.9, metavar="SHARE", help="of requests that must meet --goodput")
    add("--search", action="store_true", help="find the largest rate that meets --goodput, with a confidence bound")


def run(args: argparse.Namespace) -> int:
    """Run every point, print one table, write one page."""
    import uvloop

    from steelyard.bench.export import compare_markdown
    from steelyard.cli.bench_save import save

    if args.search:
        _check_search(args)
    sweep, capacity, stopped = _Sweep(args), None, False
    try:
        capacity = uvloop.run(sweep.run())
    except KeyboardInterrupt:
        if not sweep.results:
            raise
        stopped = True
    results = sweep.results
    print(compare_markdown([r.report for r in results], points=True))
    if capacity is not None:
        print(_said(capacity))
    if args.save_result:
        save(args.result_dir, results)
        path = args.result_dir / "sweep.html"
        path.write_text(_page(results, capacity))
        print(f"wrote {path}", file=sys.stderr)
    if stopped:
        raise KeyboardInterrupt(f"the table is of the {len(results)} runs that had ended")
    return 0


def _check_search(args: argparse.Namespace) -> None:
    """A search that no rate could end well is refused before it runs. Raises InvalidRequest."""
    from steelyard.bench.stats import share_lower

    if not args.goodput:
        raise InvalidRequest("--search needs --goodput: without a target every rate meets it", param="goodput")
    if args.attainment == 1.0:
        raise InvalidRequest("--attainment 1: no number of requests shows that all meet a target", param="attainment")
    enough = args.num_prompts
    while share_lower(enough, enough) < args.attainment:
        enough += max(enough // 50, 1)
    if enough > args.num_prompts:
        raise InvalidRequest(
            f"--num-prompts {args.num_prompts}: too few to show {args.attainment:.0%} at 95 % confidence, even if all "
            f"meet their targets; give {enough}",
            param="num_prompts",
        )


class _Sweep:
    """The runs of one sweep, `results`: the same server, targets and self-test, a seed and a nonce a point."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._number = 0
        self.results: list[RunResult] = []

    async def run(self) -> Capacity | None:
        from steelyard.bench.sweep import rates_between, search_capacity

        self._server = await find_server(self._args)
        self._options = await run_options(self._args, make_work(self._args))
        alone = await self._closed(1)
        full = await self._closed(self._args.saturation)
        low, high = (r.report["summary"]["windows"]["whole run"]["request_rate"] for r in (alone, full))
        for rate in rates_between(low, max(high, low), self._args.points):
            await self._open(rate)
        if not self._args.search:
            return None
        return await search_capacity(self._point, max(high / 2, 1e-3), attainment=self._args.attainment)

    async def _point(self, rate: float) -> Point:
        from steelyard.bench.sweep import Point

        result = await self._open(rate)
        whole = result.report["summary"]["windows"]["whole run"]
        scheduled = whole["scheduled"]
        met = round(whole.get("attainment", 1.0) * scheduled)
        return Point(rate, scheduled, met, "INVALID" not in result.report["label"], result)

    async def _closed(self, slots: int) -> RunResult:
        args = copy(self._args)
        args.request_rate, args.max_concurrency = None, slots
        if slots == 1:
            args.num_prompts = max(args.num_prompts // 8, 4)
        return await self._measure(args, f"{slots} at a time")

    async def _open(self, rate: float) -> RunResult:
        args = copy(self._args)
        args.request_rate = rate
        return await self._measure(args, f"{rate:.3g} requests/s")

    async def _measure(self, args: argparse.Namespace, name: str) -> RunResult:
        from dataclasses import replace

        from steelyard.bench.session import run_session

        self._number += 1
        print(f"{name} ...", file=sys.stderr, flush=True)
        work = make_work(args, seed=args.seed + self._number)
        with Display(len(work.requests), sys.stderr.isatty()) as show:
            result = await run_session(self._server, work, replace(self._options, name=name), show)
        if result.stopped:
            raise asyncio.CancelledError
        self.results.append(result)
        return result


def _said(capacity: Capacity) -> str:
    above = "nothing above was tried" if capacity.above is None else f"{capacity.above:.3g}/s was not shown to"
    return (
        f"Capacity: {capacity.rate:.3g} requests/s meets the targets for {capacity.attainment:.0%} of requests at 95 % "
        f"confidence; {above}."
    )


def _page(results: list[RunResult], capacity: Capacity | None) -> str:
    from steelyard.cli.bench_page import page
    from steelyard.cli.plan_svg import Axis, Plot

    whole = [r.report["summary"]["windows"]["whole run"] for r in results]
    known = [(r, w) for r, w in zip(results, whole) if w["latency_ms"]["user"]["e2e"] is not None]
    xs = [w["output_tokens_per_s"] for _, w in known]
    ys = [w["latency_ms"]["user"]["e2e"]["p50"] for _, w in known]
    plot = Plot(
        Axis("output tokens/s", 0.0, max(xs, default=1.0) * 1.1 or 1.0),
        Axis("E2E from schedule, p50, ms", 0.0, max(ys, default=1.0) * 1.1 or 1.0),
        "Throughput against latency",
    )
    for (result, _), x, y in zip(known, xs, ys):
        plot.dot(x, y, "s0" if result.valid else "s1", result.report["name"], f"{x:.1f} tokens/s, {y:.1f} ms")
    note = "Orange: the run failed a check and is not a result."
    more = [("Throughput against latency", f"<figure>{plot.svg()}<figcaption>{note}</figcaption></figure>")]
    if capacity is not None:
        more.append(("Capacity", f"<p>{_said(capacity)}</p>"))
    return page([r.report for r in results], "Sweep", more, points=True)
