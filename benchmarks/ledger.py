"""What the ledgers cost: microseconds a step with them on and off, over a scripted runner.

    python benchmarks/ledger.py [--rows 16,64,256,1024] [--steps 600] [--out benchmarks/results/ledger.json]

Two engines that differ in nothing but their ledgers take turns of some steps, so that both see the same machine, each
with its own data in the caches; `hooks` is the time inside the hooks themselves. `decode`: every row makes one token a
step. `churn`: besides, rows end and others arrive, so that participants change at every step. Times are the thread's
own on its processor: what else the machine does while it waits is not counted, only what it does to the caches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

from steelyard.cache.manager import CacheManager
from steelyard.core.environment import environment
from steelyard.core.request import Request
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import KvGroup, RunnerCaps, StepPlan, StepResult
from steelyard.engine.engine import Engine
from steelyard.engine.ledgers import Ledgers
from steelyard.ledger.accounts import Account
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.scripted import Script, ScriptedRunner
from steelyard.wire.messages import Finished, Submit

AIM_ROWS, AIM_US = 256, 50.0
PROMPT_LEN = 64
TURN_STEPS, WARM_STEPS = 20, 5
CHURN_LEN = 64


class NoLedgers(Ledgers):
    """Hooks that do nothing."""

    def opened(self, request: Request, was_idle: bool) -> None:
        return

    def launched(self, plan: StepPlan, request_at: object) -> None:
        return

    def committed(self, result: StepResult, now_ns: int, request_at: object) -> None:
        return

    def account(self, request: Request) -> Account | None:
        return None


class TimedLedgers(Ledgers):
    """The real hooks, and how long a step's calls took."""

    spent_ns = 0

    def launched(self, plan: StepPlan, request_at: object) -> None:
        began_ns = time.thread_time_ns()
        super().launched(plan, request_at)  # type: ignore[arg-type]
        self.spent_ns += time.thread_time_ns() - began_ns

    def committed(self, result: StepResult, now_ns: int, request_at: object) -> None:
        began_ns = time.thread_time_ns()
        super().committed(result, now_ns, request_at)  # type: ignore[arg-type]
        self.spent_ns += time.thread_time_ns() - began_ns


class Bench:
    """An engine kept full of requests."""

    def __init__(self, num_rows: int, output_len: int, ledgers: type[Ledgers]) -> None:
        caps = RunnerCaps(
            block_size=16,
            num_blocks=(num_rows * 512,),
            groups=(KvGroup(1),),
            max_rows=num_rows,
            max_model_len=100_000,
            max_batched_tokens=max(4096, 16 * num_rows),
            vocab_size=32_000,
            overlaps=True,
            fingerprint="null",
            kv_layout="null",
        )
        cache = CacheManager(caps)
        scheduler = Scheduler(caps, cache, SchedulerOptions(overlap=True))
        runner = ScriptedRunner(caps, Script(eos_token_id=1, default=(7,) * 100_000))
        self.engine = Engine(runner, cache, scheduler, ledgers=ledgers(num_rows, time.monotonic_ns()))
        self.output_len = output_len
        self.num_added = 0
        for i in range(num_rows):
            self.add(output_len if output_len > CHURN_LEN else 1 + i * output_len // num_rows)

    def add(self, max_tokens: int) -> None:
        self.num_added += 1
        tokens = [self.num_added % 32_000] * PROMPT_LEN
        self.engine.submit(Submit(str(self.num_added), tokens, SamplingParams(max_tokens=max_tokens, seed=1)))

    def step(self) -> int:
        """Nanoseconds of one turn of the loop; what ended is replaced outside the measured time."""
        began_ns = time.thread_time_ns()
        messages = self.engine.step()
        spent_ns = time.thread_time_ns() - began_ns
        for message in messages:
            if isinstance(message, Finished):
                self.add(self.output_len)
        return spent_ns


def measure(num_rows: int, num_steps: int, output_len: int) -> dict[str, float]:
    """Medians of a step, in microseconds."""
    on, off = Bench(num_rows, output_len, TimedLedgers), Bench(num_rows, output_len, NoLedgers)
    for _ in range(200):
        on.step()
        off.step()
    with_us, without_us, hooks_us = [], [], []
    ledgers = on.engine.ledgers
    assert isinstance(ledgers, TimedLedgers)
    for _ in range(-(-num_steps // TURN_STEPS)):
        for at in range(WARM_STEPS + TURN_STEPS):
            ledgers.spent_ns = 0
            spent_ns = on.step()
            if at >= WARM_STEPS:
                with_us.append(spent_ns / 1000)
                hooks_us.append(ledgers.spent_ns / 1000)
        turn_ns = [off.step() for _ in range(WARM_STEPS + TURN_STEPS)]
        without_us += [spent_ns / 1000 for spent_ns in turn_ns[WARM_STEPS:]]
    return {
        "on_us": round(median(with_us), 1),
        "off_us": round(median(without_us), 1),
        "difference_us": round(median(with_us) - median(without_us), 1),
        "hooks_us": round(median(hooks_us), 1),
        "hooks_best_decile_us": round(sorted(hooks_us)[len(hooks_us) // 10], 1),
        "on_off_ratio": round(median(with_us) / median(without_us), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", default="16,64,256,1024")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ledger.json")
    args = parser.parse_args()
    report: dict[str, object] = {
        "what": "ledgers on against off, microseconds a step",
        "environment": environment(),
        "steps": args.steps,
    }
    for load, output_len in (("decode", 4000), ("churn", CHURN_LEN)):
        table = {int(rows): measure(int(rows), args.steps, output_len) for rows in args.rows.split(",")}
        report[load] = table
        for rows, line in table.items():
            print(f"{load:8}{rows:6} rows  " + "  ".join(f"{name} {value}" for name, value in line.items()))
            if rows == AIM_ROWS:
                verdict = "met" if line["hooks_us"] <= AIM_US else "missed"
                print(f"{'':8}aim at {AIM_ROWS} rows: {AIM_US} us, {verdict}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
