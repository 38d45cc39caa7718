"""Host cost of a step: schedule + commit over a runner that does nothing, by number of running rows.

    python benchmarks/scheduler.py [--rows 16,64,256,1024] [--steps 400] [--out benchmarks/results/scheduler.json]

`decode`: every row makes one token a step and nothing else changes. `churn`: besides, a share of the rows ends and as
many requests of 64 prompt tokens arrive, every step. Overlap is on; the runner's own time is not counted. Times are
wall time; the best decile is what the code costs when nothing else wants the core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path
from statistics import median

from steelyard.cache.manager import CacheManager
from steelyard.core.environment import environment
from steelyard.core.request import Ended, Request
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import KvGroup, RunnerCaps, StepPlan, StepResult
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.scripted import Script, ScriptedRunner

PROMPT_LEN = 64
CHURN_LEN = 64
NEVER = 1_000_000
AIM_ROWS, AIM_US = 256, 1000.0


class Bench:
    """One scheduler kept full of requests, stepped with two steps in flight."""

    def __init__(self, num_rows: int, output_len: int) -> None:
        caps = RunnerCaps(
            block_size=16,
            num_blocks=(num_rows * 256,),
            groups=(KvGroup(1),),
            max_rows=num_rows,
            max_model_len=2 * NEVER,
            max_batched_tokens=max(4096, 16 * num_rows),
            vocab_size=32_000,
            overlaps=True,
            fingerprint="null",
            kv_layout="null",
        )
        self.scheduler = Scheduler(caps, CacheManager(caps), SchedulerOptions(overlap=True))
        self.runner = ScriptedRunner(caps, Script(eos_token_id=1, default=(7,) * 100_000))
        self.launched: deque[tuple[StepPlan, StepResult]] = deque()
        self.output_len = output_len
        self.num_added = 0
        for i in range(num_rows):
            self.add(1 + (i * output_len) // num_rows if output_len < NEVER else 4000)

    def add(self, max_tokens: int) -> None:
        self.num_added += 1
        prompt = [self.num_added % 32_000] * PROMPT_LEN
        params = SamplingParams(max_tokens=max_tokens, seed=self.num_added)
        now_ns = time.perf_counter_ns()
        self.scheduler.add(Request(str(self.num_added), prompt, params, now_ns), now_ns)

    def step(self) -> int:
        """Nanoseconds of schedule + commit; ended requests are replaced outside the measured time."""
        began_ns = time.perf_counter_ns()
        plan = self.scheduler.schedule(time.perf_counter_ns())
        host_ns = time.perf_counter_ns() - began_ns
        if plan is not None:
            self.launched.append((plan, self.runner.launch(plan)))
        if len(self.launched) < 2 and plan is not None:
            return host_ns
        _, handle = self.launched.popleft()
        result = self.runner.collect(handle)
        began_ns = time.perf_counter_ns()
        events = self.scheduler.commit(result, time.perf_counter_ns())
        host_ns += time.perf_counter_ns() - began_ns
        for event in events:
            if isinstance(event, Ended):
                self.add(self.output_len)
        return host_ns


def measure(num_rows: int, num_steps: int, output_len: int) -> dict[str, float]:
    """Microseconds a step after a warm-up: best decile, median and 99th percentile."""
    bench = Bench(num_rows, output_len)
    for _ in range(80):
        bench.step()
    times_us = sorted(bench.step() / 1000 for _ in range(num_steps))
    return {
        "best_decile_us": round(times_us[num_steps // 10], 1),
        "median_us": round(median(times_us), 1),
        "p99_us": round(times_us[int(0.99 * (num_steps - 1))], 1),
        "us_per_row": round(median(times_us) / num_rows, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", default="16,64,256,1024")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scheduler.json")
    args = parser.parse_args()
    report: dict[str, object] = {
        "what": "schedule + commit, microseconds a step",
        "environment": environment(),
        "steps": args.steps,
    }
    for load, output_len in (("decode", NEVER), ("churn", CHURN_LEN)):
        rows = [int(text) for text in args.rows.split(",")]
        table = {num: measure(num, args.steps, output_len) for num in rows}
        report[load] = table
        print(f"{load:8}{'rows':>6}{'best 10% us':>12}{'median us':>12}{'p99 us':>10}{'us / row':>10}")
        for num, line in table.items():
            print(
                f"{'':8}{num:6}{line['best_decile_us']:12}{line['median_us']:12}{line['p99_us']:10}{line['us_per_row']:10}"
            )
            if num == AIM_ROWS:
                print(f"{'':8}aim at {AIM_ROWS} rows: {AIM_US} us, {'met' if line['median_us'] < AIM_US else 'missed'}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
