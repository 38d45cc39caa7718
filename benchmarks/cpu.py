"""CPU speed on SmolLM2 beside transformers and llama.cpp, all in one run: decode, prefill, concurrent streams.

    python benchmarks/cpu.py [--threads 2] [--repeats 5] [--llama-python PATH] [--out benchmarks/results/cpu.json]

--llama-python: an interpreter that has llama-cpp-python (docs/cpu.md says how it was built); without one its column is
left out. Each engine is a process of its own that stays loaded; cells are measured in turns (engine A, B, C, A, B, C,
...), so that what else the machine does strikes all alike, and the best of each cell's repeats counts. All get the
setting of OpenMP that our engine process gets. Wall time is what a user waits; CPU time (all threads) depends less on
who else runs. Ratios are of tokens per second, ours over theirs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.checkpoint.find import open_checkpoint
from steelyard.engine.threads import with_short_spins
from steelyard.perf.environment import environment

WORKERS = Path(__file__).with_name("cpu_workers.py")
AGREEMENT = Path(__file__).with_name("cpu_agreement.py")
CELLS: dict[str, dict[str, int]] = {
    "decode, 1 stream": {"rows": 1, "prompt_len": 64, "steps": 32},
    "decode, 4 streams": {"rows": 4, "prompt_len": 64, "steps": 16},
    "decode, 16 streams": {"rows": 16, "prompt_len": 64, "steps": 16},
    "prefill of 1,024": {"rows": 1, "prompt_len": 1024, "steps": 0},
}
GOALS = [
    ("decode, 1 stream", "llama.cpp", 0.9),
    ("prefill of 1,024", "llama.cpp", 3.0),
    *[(cell, theirs, 1.5) for cell in CELLS for theirs in ("transformers", "transformers-bfloat16")],
]
STREAMS_GOAL = 4.0
Rates = dict[str, dict[str, dict[str, float]]]


class Process:
    """A worker: one engine, loaded."""

    def __init__(self, engine: str, python: str, path: Path, threads: int) -> None:
        command = [python, str(WORKERS), engine, str(path), str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=with_short_spins(os.environ), **pipes)
        self.load_s = self._read()["load"]

    def measure(self, cell: Mapping[str, int]) -> list[float]:
        """[wall, CPU] seconds of the cell's phase: its decode steps, or its prefill if it has none."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(cell) + "\n")
        self._process.stdin.flush()
        found: list[float] = self._read()["decode" if cell["steps"] else "prefill"]
        return found

    def close(self) -> None:
        """End the worker and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended early; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(processes: Mapping[str, Process], repeats: int) -> Rates:
    """cell -> engine -> tokens per second of wall and of CPU time: best of `repeats` rounds after an unmeasured one."""
    best: dict[tuple[str, str], list[float]] = {}
    for turn in range(repeats + 1):
        for name, cell in CELLS.items():
            for engine, process in processes.items():
                taken = process.measure(cell)
                if turn:
                    before = best.get((name, engine), [math.inf, math.inf])
                    best[name, engine] = [min(pair) for pair in zip(before, taken, strict=True)]
    rates: Rates = {}
    for (name, engine), (wall_s, cpu_s) in best.items():
        cell = CELLS[name]
        tokens = cell["rows"] * (cell["steps"] or cell["prompt_len"])
        rates.setdefault(name, {})[engine] = {"wall": tokens / wall_s, "cpu": tokens / cpu_s}
    return rates


def agreement(path: Path) -> dict[str, float]:
    """What benchmarks/cpu_agreement.py says of the file."""
    command = [sys.executable, str(AGREEMENT), str(path)]
    done = subprocess.run(command, env=with_short_spins(os.environ), stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def verdicts(rates: Rates) -> list[dict[str, Any]]:
    """Every goal with the ratios of wall and CPU time, where both sides were measured."""
    found = []
    for cell, theirs, goal in GOALS:
        if theirs in rates[cell]:
            ratios = {k: rates[cell]["steelyard"][k] / rates[cell][theirs][k] for k in ("wall", "cpu")}
            found.append({"cell": cell, "against": theirs, "goal": goal, **ratios})
    one, many = rates["decode, 1 stream"]["steelyard"], rates["decode, 16 streams"]["steelyard"]
    ratios = {k: many[k] / one[k] for k in ("wall", "cpu")}
    found.append({"cell": "decode, 16 streams", "against": "our single stream", "goal": STREAMS_GOAL, **ratios})
    return found


def main() -> None:
    """Start every engine, measure in turns, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--llama-python")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    path = open_checkpoint("smollm2").path
    pythons = dict.fromkeys(("steelyard", "steelyard-float32", "transformers", "transformers-bfloat16"), sys.executable)
    if options.llama_python:
        pythons["llama.cpp"] = options.llama_python
    processes = {name: Process(name, python, path, options.threads) for name, python in pythons.items()}
    rates = measure(processes, options.repeats)
    for process in processes.values():
        process.close()
    report = {
        "model": path.name,
        "threads": options.threads,
        "repeats": options.repeats,
        "environment": environment(),
        "load_wall_and_cpu_s": {name: process.load_s for name, process in processes.items()},
        "tokens_per_s": rates,
        "ratios": verdicts(rates),
        "packed_against_float32": agreement(path),
    }
    for found in report["ratios"]:
        print("{cell:20} / {against:22} goal {goal:4.1f}   wall {wall:5.2f}   cpu {cpu:5.2f}".format(**found))
    print(report["packed_against_float32"])
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
