"""`steelyard bench latency`: its flags. One request's first and later tokens, and a step's time by batch size."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from steelyard.cli.bench_throughput import add_common_arguments, rows_kept, start, workload_names
from steelyard.cli.ticker import Ticker
from steelyard.cli.values import counts, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", default="single", help=workload_names("single"))
    parser.add_argument("--runs", type=whole(1), default=3, help="of each; the median is reported")
    parser.add_argument("--batch", type=counts, metavar="LOW..HIGH", help="a curve over powers of two, such as 1..256")
    parser.add_argument("--input", type=whole(1), default=1024, help="prompt tokens of the curve's requests")
    parser.add_argument("--output", type=whole(1), default=64, help="output tokens of the curve's requests")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a line a case, and write what was asked for."""
    from steelyard.perf.steps import append_jsonl
    from steelyard.perf.throughput import Sampling, batch_case, batch_point, record_steps, roofline_of, run_case
    from steelyard.perf.workloads import case_names, find_case

    batches = _batches(args.batch)
    cases = [find_case(n) for n in (case_names("single") if args.workload == "single" else args.workload.split(","))]
    longest = max(sum(pair) for case in cases for pair in case.lens)
    llm, config = start(args, max(longest, args.input + args.output if batches else 0))
    recorder, sampling = record_steps(llm), Sampling(args.temperature, config.seed)
    with rows_kept(args.json, config) as rows:
        for case in cases:
            with Ticker(case.name) as show:
                runs = [run_case(llm, case, recorder, sampling, show) for _ in range(args.runs)]
            middle = sorted(runs, key=lambda r: r.seconds)[len(runs) // 2]
            ttft_ms, tpot_ms = middle.first_s * 1e3, middle.tpot_s * 1e3
            rows.append(asdict(middle) | {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms})
            print(f"{case.name:20} TTFT {ttft_ms:9.2f} ms   TPOT {tpot_ms:8.3f} ms", flush=True)
        roofline = roofline_of(llm, config.model) if batches else None
        if batches:
            print(f"{'batch':>6} {'step ms':>9} {'tok/s':>10} {'MFU':>6} {'MBU':>6} {'launch share':>13}")
        for batch in batches:
            case = batch_case(batch, args.input, args.output)
            with Ticker(case.name) as show:
                run_case(llm, case, recorder, sampling, show)
            point = batch_point(recorder, batch, roofline)
            rows.append({"case": case.name} | asdict(point))
            print(
                f"{batch:6d} {point.step_ms:9.3f} {point.tokens_per_s:10.1f} {_percent(point.mfu):>6} "
                f"{_percent(point.mbu):>6} {point.launch_share:13.1%}",
                flush=True,
            )
            if args.steps is not None:
                append_jsonl(args.steps, recorder.named(f"batch {batch}"))
    return 0


def _batches(ends: tuple[int, int] | None) -> list[int]:
    """Powers of two times LOW, up to HIGH, HIGH itself the last; none without ends."""
    if ends is None:
        return []
    first, last = ends
    sizes = [first * 2**k for k in range(20) if first * 2**k < last]
    return [*sizes, last]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
