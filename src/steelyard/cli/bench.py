"""`steelyard bench NAME`: measurements. One module a bench, `steelyard.cli.bench_NAME`, light to import."""

from __future__ import annotations

import argparse
import importlib

BENCHES: dict[str, str] = {
    "throughput": "offline workloads by name, in this process: tokens per second",
    "latency": "one request's first and later tokens, and a decode step's time by batch size",
    "sweep": "load a server from one request at a time to past the knee; its capacity under targets",
    "selftest": "can this machine see streams on time? The client against an echo server, no model",
    "serve": "load any OpenAI-compatible server over HTTP; latencies, throughput, and whether to believe them",
    "report": "saved runs side by side, as one page, Markdown and CSV",
    "kernels": "attention kernels against each other, the machine's ceilings and naive attention",
}
"""Name and one-line help. Module `steelyard.cli.bench_NAME` has `add_arguments(parser)` and `run(args) -> int`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, text in BENCHES.items():
        sub = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        module = importlib.import_module(f"steelyard.cli.bench_{name.replace('-', '_')}")
        module.add_arguments(sub)
        sub.set_defaults(run_bench=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen bench."""
    return int(args.run_bench(args))
