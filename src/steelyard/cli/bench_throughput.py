"""`steelyard bench throughput`: its flags. Workloads by name, offline, in this process; the measuring is in perf."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.cli.options import add_engine_arguments, engine_config
from steelyard.cli.ticker import Ticker
from steelyard.cli.values import above, new_file, real, whole
from steelyard.config import EngineConfig
from steelyard.errors import InvalidRequest

if TYPE_CHECKING:
    from steelyard.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", default="offline", help=workload_names("offline"))
    parser.add_argument("--runs", type=whole(1), default=1, help="of each workload; the median is reported")
    parser.add_argument("--share", type=above(0, 1), default=1.0, help="of each workload's requests, 0.01 for a look")
    add_common_arguments(parser)


def workload_names(kind: str) -> str:
    """What --workload may be, for its help: names with the number of their requests."""
    from steelyard.perf.workloads import case_names, find_case

    sizes = {name: len(find_case(name).lens) for name in case_names(kind)}
    known = ", ".join(f"{name} ({n} request{'s'[n == 1 :]})" for name, n in sizes.items())
    return f"names or beginnings of them, comma-separated: {known}; `{kind}`: all of these"


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every offline bench: outputs, and those of the engine."""
    parser.add_argument("--temperature", type=real(0), default=1.0, help="of sampling")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write rows and environment")
    parser.add_argument("--steps", type=new_file, metavar="FILE", help="append a record of each step (JSON Lines)")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a line a workload, and write what was asked for."""
    from steelyard.perf.steps import append_jsonl
    from steelyard.perf.throughput import Sampling, record_steps, run_case
    from steelyard.perf.workloads import case_names, find_case

    names = case_names("offline") if args.workload == "offline" else args.workload.split(",")
    cases = [find_case(name).scaled(args.share) for name in names]
    llm, config = start(args, max(max(pair) + min(pair) for case in cases for pair in case.lens))
    recorder, sampling = record_steps(llm), Sampling(args.temperature, config.seed)
    with rows_kept(args.json, config) as rows:
        for case in cases:
            runs = []
            for _ in range(args.runs):
                with Ticker(case.name) as show:
                    runs.append(run_case(llm, case, recorder, sampling, show))
                if args.steps is not None:
                    append_jsonl(args.steps, recorder.named(case.name))
            middle = sorted(runs, key=lambda r: r.seconds)[len(runs) // 2]
            rate = middle.output_tokens / middle.seconds
            rows.append(asdict(middle) | {"out_tok_s": rate, "all_seconds": [r.seconds for r in runs]})
            busy = middle.device_s / middle.seconds
            print(
                f"{case.name:26} {middle.seconds:9.3f} s {rate:10.1f} out tok/s {middle.steps:6d} steps, "
                f"device busy {busy:.0%}",
                flush=True,
            )
    return 0


def start(args: argparse.Namespace, context: int) -> tuple[LLM, EngineConfig]:
    """The engine that the flags name; a model that is only a config here gets random weights.

    Raises InvalidRequest if the longest request does not fit the context.
    """
    from steelyard.llm import LLM
    from steelyard.perf.workloads import model_config, write_config

    config = replace(engine_config(args), skip_tokenizer_init=True)
    with tempfile.TemporaryDirectory() as folder:
        used = config
        if config.load_format == "dummy" and not Path(config.model).exists() and model_config(config.model):
            used = replace(config, model=str(write_config(config.model, Path(folder))))
        llm = LLM.from_config(used)
    limit = llm.engine.runner.caps.max_model_len
    if context > limit:
        raise InvalidRequest(f"--max-model-len {limit}: the workload needs {context} tokens", param="max_model_len")
    return llm, config


@contextmanager
def rows_kept(path: Path | None, config: EngineConfig) -> Iterator[list[dict[str, Any]]]:
    """A list for rows of what is measured. It is written at the end, with configuration and environment as JSON, and
    where Ctrl-C ends it too: KeyboardInterrupt then says how many there are."""
    rows: list[dict[str, Any]] = []
    try:
        yield rows
    except KeyboardInterrupt:
        if rows:
            _write(path, config, rows)
            raise KeyboardInterrupt(f"{len(rows)} cases had been measured") from None
        raise
    _write(path, config, rows)


def _write(path: Path | None, config: EngineConfig, rows: list[dict[str, Any]]) -> None:
    from steelyard.perf.environment import environment

    if path is not None:
        report = {"environment": environment(), "config": asdict(config), "rows": rows}
        path.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {path}")
