"""Swap against recompute on one device: the same tokens, then the time of each way and the factor that was predicted.

    python3 benchmarks/h200_swap.py OUT [--model llama3-8b] [--tokens 4096] [--runs 5]
    python3 benchmarks/h200_swap.py OUT --model tiny --tokens 256 --device cpu --runs 2       anywhere, in seconds

Two requests of `tokens` each decode side by side in a pool that holds both prompts and little more. The younger one is
displaced when the pool is full and comes back when the older one has ended; what its way out and back cost is the time
of the steps that carried it over that of a plain decode step. Weights are dummies. Rows go to OUT/h200_swap.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steelyard.cache.manager import CacheManager
from steelyard.checkpoint.find import open_checkpoint
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import Runner, StepPlan
from steelyard.engine.costs import EngineCost
from steelyard.engine.engine import Engine, EngineOptions
from steelyard.engine.ledgers import Ledgers, Measure
from steelyard.engine.measures import block_bytes, measure_on, plan_device
from steelyard.perf.workloads import write_config
from steelyard.plan.shape import ModelShape
from steelyard.runner.options import RunnerOptions
from steelyard.runner.start import start_runner
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.wire.messages import Deltas, Submit

GIB = 2**30
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Fixed:
    """A Cost that always says the same: which way is cheaper."""

    swaps: bool

    def step_ns(self, num_tokens: int, num_rows: int, context_tokens: int) -> int:
        return num_tokens

    def recompute_ns(self, num_tokens: int) -> int:
        return 100 * num_tokens

    def swap_ns(self, num_tokens: int) -> int:
        return num_tokens if self.swaps else 100 * num_tokens


@dataclass(frozen=True)
class Ran:
    """One run: what came out, and milliseconds of the displaced request's way."""

    ids: dict[str, list[int]]
    num_blocks: int
    out_ms: float
    in_ms: float
    recompute_ms: float


def config_of(model: str, folder: Path) -> Path:
    if model != "tiny":
        return Path(model) if Path(model).is_dir() else write_config(model, folder)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def start(place: Path, args: argparse.Namespace, block_size: int) -> Runner:
    """A runner whose pool holds both prompts, the first step of each, and a few blocks."""
    num_prompt = -(-args.tokens // block_size)
    return start_runner(
        open_checkpoint(str(place), "dummy"),
        RunnerOptions(
            dtype=args.dtype, load_format="dummy", device=args.device, max_num_seqs=8, block_size=block_size,
            max_model_len=args.tokens + 12 * block_size, max_num_batched_tokens=args.budget,
            num_gpu_blocks_override=2 * num_prompt + 4, swap_space_bytes=int(args.swap_space * GIB),
        ),
    )  # fmt: skip


def run(runner: Runner, tokens: int, swaps: bool) -> Ran:
    """Both requests to their ends, one of them displaced once."""
    caps = runner.caps
    cache = CacheManager(caps, enable_prefix_caching=False)
    ledgers = Ledgers(caps.max_rows, 0)
    scheduler = Scheduler(caps, cache, SchedulerOptions(overlap=caps.overlaps, watermark=0.0), cost=Fixed(swaps))
    engine = Engine(runner, cache, scheduler, EngineOptions("swap", frozenset(), 0), ledgers=ledgers)
    plans: dict[int, StepPlan] = {}
    launch = runner.launch

    def kept(plan: StepPlan) -> Any:
        plans[plan.id] = plan
        return launch(plan)

    runner.launch = kept  # type: ignore[method-assign]
    sampling = SamplingParams(max_tokens=8 * caps.block_size, temperature=0.0, ignore_eos=True)
    for name in ("older", "younger"):
        prompt = [(7 * i + len(name)) % (caps.vocab_size - 8) + 4 for i in range(tokens)]
        engine.submit(Submit(name, prompt, sampling))
    ids: dict[str, list[int]] = {}
    while engine.has_work:
        for message in engine.step():
            if isinstance(message, Deltas):
                for item in message.items:
                    ids.setdefault(item.id, []).extend(item.ids)
    runner.launch = launch  # type: ignore[method-assign]
    leaving = tuple(scheduler._live.rows.leave)  # the next scheduler on this runner finds every row free
    runner.collect(runner.launch(StepPlan(0, leave=leaving)))
    counters = scheduler.counters
    assert counters.preemptions >= 1, "nobody was displaced: the pool is too large"
    assert bool(counters.swaps_out) == swaps and bool(counters.recomputed_tokens) != swaps, counters
    return _read(ledgers, plans, ids, counters.preemptions)


def _read(ledgers: Ledgers, plans: dict[int, StepPlan], ids: dict[str, list[int]], times: int) -> Ran:
    """Milliseconds above a plain decode step, of each displacement."""
    spent = {"out": 0.0, "in": 0.0, "again": 0.0}
    entries = list(ledgers.book.entries)
    plain = [e.device_ns for e in entries if not plans[e.id].swaps and e.rows.is_decode.all()]
    decode_ns = statistics.median(plain)
    num_blocks = 0
    for entry in entries:
        swaps = plans[entry.id].swaps
        above_ns = max(entry.device_ns - decode_ns, 0.0)
        if any(s.out for s in swaps):
            spent["out"] += above_ns
            num_blocks += sum(s.out for s in swaps)
        elif swaps:
            spent["in"] += above_ns
        elif entry.rows.num_again.any():
            spent["again"] += entry.device_ns
    return Ran(ids, num_blocks // times, *(v / times / 1e6 for v in spent.values()))


def predicted(runner: Runner, place: Path, tokens: int, recompute_ms: float) -> dict[str, Any]:
    """The factor by the plan where the device is known; else only the copy's part, from the rate measured at start."""
    shape = ModelShape.from_config(json.loads((place / "config.json").read_text()))
    device = plan_device()
    measure: Measure | None = measure_on(device, shape, runner.caps) if device is not None else None
    cost = EngineCost(runner.caps, block_bytes(shape, runner.caps), Ledgers(1, 0).book, measure)
    recompute_ns = cost.recompute_ns(tokens) if measure is not None else recompute_ms * 1e6
    return {
        "recompute_ms": recompute_ns / 1e6 if measure is not None else None,
        "swap_one_way_ms": cost.swap_ns(tokens) / 1e6,
        "factor": recompute_ns / (2 * cost.swap_ns(tokens)),
    }


def first_difference(a: dict[str, list[int]], b: dict[str, list[int]]) -> int | None:
    """The earliest output position at which two runs part; None: they do not.

    What is computed again goes through the prefill kernel, which rounds otherwise than decode: in bfloat16 random
    weights part at the first near-tie after the return. tests/equality/test_gpu.py holds tokens in float32.
    """
    parted = [i for name in a for i, (x, y) in enumerate(zip(a[name], b[name], strict=True)) if x != y]
    return min(parted, default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--swap-space", type=float, default=4.0)
    args = parser.parse_args()
    block_size = 64 if args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available()) else 16
    with tempfile.TemporaryDirectory() as folder:
        place = config_of(args.model, Path(folder))
        runner = start(place, args, block_size)
        run(runner, args.tokens, swaps=True)  # the first of everything is slow
        swapped, again = ([run(runner, args.tokens, way) for _ in range(args.runs)] for way in (True, False))
        first = [first_difference(s.ids, a.ids) for s, a in zip(swapped, again)]
        out_ms, in_ms = (statistics.median(getattr(r, n) for r in swapped) for n in ("out_ms", "in_ms"))
        recompute_ms = statistics.median(r.recompute_ms for r in again)
        report = {
            "model": args.model, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "tokens": args.tokens, "blocks": swapped[0].num_blocks, "runs": args.runs,
            "dtype": args.dtype, "first_different_token": first,
            "host_gb_per_s": runner.caps.host_bandwidth / 1e9,
            "swap_out_ms": out_ms, "swap_in_ms": in_ms, "recompute_ms": recompute_ms,
            "factor": recompute_ms / max(out_ms + in_ms, 1e-6),
            "predicted": predicted(runner, place, args.tokens, recompute_ms),
        }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "h200_swap.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
