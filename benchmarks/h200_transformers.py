"""This engine beside transformers on one GPU: latency, throughput, KV. Run: python3 benchmarks/h200_transformers.py OUT

    single 128/33        TTFT and TPOT; transformers is timed by generate() of 1 and of 33 tokens
    32 of mixed          the first requests of the workload. transformers: one static batch, left-padded to the longest
                         prompt and generated to the longest answer; only tokens that a request asked for count
    mixed, whole         this engine alone, all requests at once, as a server would take them

    --model NAME of the workloads' file    --longest N clips answers    anywhere: --device cpu --config DIR --divisor 16

Each engine is a process of its own, random weights. Both decode greedily. Rows go to OUT/transformers-NAME.json with
what is held against what live requests need, the ratios, and whether a claim of others' is shown or refuted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from steelyard.llm import LLM, Progress
from steelyard.perf.environment import environment
from steelyard.perf.padded_batch import KvHeld, static_samples
from steelyard.perf.peers import BATCH, ENGINES, SINGLE, WHOLE, judged, kv_fields, table
from steelyard.perf.throughput import Sampling, record_steps, run_case
from steelyard.perf.workloads import Case, find_case, write_config

Json = dict[str, Any]
SINGLE_LENS = (128, 33)
NUM_BATCH = 32
GREEDY = Sampling(temperature=0.0)


def cases(args: argparse.Namespace) -> dict[str, Case]:
    """The cases, shortened as asked; ids follow from the names of the workloads."""
    mixed = find_case("mixed")

    def cut(lens: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        d = args.divisor
        return tuple((max(i // d, 4), min(max(o // d, 4), args.longest)) for i, o in lens)

    return {
        SINGLE: Case("single", (SINGLE_LENS,)),
        BATCH: Case(mixed.name, cut(mixed.lens[:NUM_BATCH])),
        WHOLE: Case(mixed.name, cut(mixed.lens)),
    }


# transformers


class Peer:
    """A transformers model with random weights made where it runs, used as its documentation does: generate()."""

    def __init__(self, folder: str, device: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        self.model.generation_config.eos_token_id = None  # every answer has the length that was asked for
        self.device = torch.device(device)
        self.vocab_size = config.vocab_size

    def timed(self, prompts: list[list[int]], num_new: int) -> tuple[float, Any]:
        """(seconds, what generate() returned) of a left-padded batch."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        self.wait()
        began = time.perf_counter()
        found = self.model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, min_new_tokens=num_new,
            pad_token_id=0, return_dict_in_generate=True,
        )  # fmt: skip
        self.wait()
        seconds = time.perf_counter() - began
        assert found.sequences.shape == (len(prompts), longest + num_new), "an answer has another length"
        return seconds, found

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def single(self, case: Case, name: str) -> Json:
        """TTFT is the time of one token; TPOT what each later one adds."""
        prompts, (_, num_new) = case.prompts(self.vocab_size), case.lens[0]
        self.timed(prompts, 4)
        first_s = statistics.median(self.timed(prompts, 1)[0] for _ in range(3))
        seconds = statistics.median(self.timed(prompts, num_new)[0] for _ in range(2))
        tpot_ms = (seconds - first_s) / (num_new - 1) * 1e3
        row = {"engine": name, "case": SINGLE, "ttft_ms": first_s * 1e3, "tpot_ms": tpot_ms, "seconds": seconds}
        return row | {"out_tok_s": num_new / seconds}

    def batch(self, case: Case, name: str) -> Json:
        """All requests in one batch, to the longest answer."""
        prompts, num_new = case.prompts(self.vocab_size), max(o for _, o in case.lens)
        self.timed(prompts, 3)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        seconds, found = self.timed(prompts, num_new)
        kv_bytes = cache_bytes(found.past_key_values)
        samples = static_samples(case.lens)
        row: Json = {"engine": name, "case": BATCH, "seconds": seconds, "mean_answer_s": seconds}
        row |= {"out_tok_s": case.output_tokens / seconds, "generated_tok_s": len(prompts) * num_new / seconds}
        row |= kv_fields(KvHeld.of(samples).scaled(kv_bytes / samples[-1][0]))
        row |= {"allocated_bytes": torch.cuda.max_memory_allocated() - before} if on_gpu else {}
        return row | {"steps": num_new, "requests": len(prompts)}


def cache_bytes(cache: Any) -> int:
    """Of all keys and values that a DynamicCache holds."""
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def run_transformers(args: argparse.Namespace) -> list[Json]:
    found = cases(args)
    began = time.perf_counter()
    peer = Peer(args.config, args.device)
    rows = [peer.single(found[SINGLE], "transformers"), peer.batch(found[BATCH], "transformers")]
    peer.model.set_attn_implementation("eager")
    rows.append(peer.single(found[SINGLE], "transformers, eager attention"))
    print(f"transformers: {time.perf_counter() - began:.0f} s in all", file=sys.stderr)
    return rows


# this engine


def watched(llm: LLM) -> tuple[list[tuple[float, float]], Callable[[Progress], None]]:
    """(bytes held, bytes needed) of requests after each step of a run, and who has to be told of the steps."""
    engine, samples = llm.engine, list[tuple[float, float]]()
    (block_bytes,) = engine.options.block_bytes
    block_size = engine.runner.caps.block_size

    def look(_: Progress) -> None:
        usage = engine.cache.usage()
        held = usage.active * block_bytes
        samples.append((held, held - usage.slack_tokens * block_bytes / block_size))

    return samples, look


def run_steelyard(args: argparse.Namespace) -> list[Json]:
    """Each case is run before it is timed; KV is watched in the first run, so that watching costs nothing."""
    found = cases(args)
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    options: Json = {"max_model_len": 8192, "gpu_memory_utilization": 0.85} if args.device == "cuda" else {}
    llm = LLM(args.config, load_format="dummy", dtype=dtype, skip_tokenizer_init=True, device=args.device, **options)
    recorder, rows = record_steps(llm), list[Json]()
    runs = [run_case(llm, found[SINGLE], recorder, GREEDY) for _ in range(6)][1:]
    first_s, tpot_s = (statistics.median(times) for times in zip(*((r.first_s, r.tpot_s) for r in runs)))
    seconds = statistics.median(r.seconds for r in runs)
    row = {"engine": "steelyard", "case": SINGLE, "ttft_ms": first_s * 1e3, "tpot_ms": tpot_s * 1e3}
    rows.append(row | {"seconds": seconds, "out_tok_s": SINGLE_LENS[1] / seconds})
    for name in (BATCH, WHOLE):
        samples, look = watched(llm)
        run_case(llm, found[name], recorder, GREEDY, look)
        ends = list[float]()
        run = run_case(llm, found[name], recorder, GREEDY, partial(noted, ends))
        row = {"engine": "steelyard", "case": name, "seconds": run.seconds, "requests": len(ends)}
        row |= {"out_tok_s": run.output_tokens / run.seconds, "steps": run.steps, "graphed": run.graphed}
        row |= {"mean_answer_s": run.seconds - statistics.fmean(ends[-1] - end for end in ends)}
        rows.append(row | kv_fields(KvHeld.of(samples)))
    return rows


def noted(ends: list[float], progress: Progress) -> None:
    """Keep when each request had its answer."""
    ends.extend([time.perf_counter()] * (progress.num_finished - len(ends)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--config", default="", help="a directory with a config.json in place of --model's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--divisor", type=int, default=1, help="shorten mixed's requests")
    parser.add_argument("--longest", type=int, default=10**6, metavar="N", help="clip mixed's answers")
    parser.add_argument("--limit", type=float, default=150.0, metavar="S", help="of each engine's process")
    parser.add_argument("--only", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(run_steelyard(args) if args.only == "steelyard" else run_transformers(args)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    result: Json = {"weights": "dummy: speed only", "clipped_at": args.longest, "divisor": args.divisor, "rows": []}
    result["environment"] = environment()
    with TemporaryDirectory() as folder:
        config = args.config or str(write_config(args.model, Path(folder)))
        for engine in ENGINES:
            result["rows"] += [{"model": args.model, **row} for row in rows_of(engine, config, args.limit)]
            save(args, result)
    failed = any("failed" in row for row in result["rows"])
    if not failed:
        result["claims"] = judged(result["rows"])
        save(args, result)
        print(table(result["rows"], result["claims"]))
    return int(failed)


def rows_of(engine: str, config: str, limit_s: float) -> list[Json]:
    """An engine's rows, from a process of its own; one row that says why where it failed."""
    command = [sys.executable, *sys.argv, "--config", config, "--only", engine]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{engine}: {error}", file=sys.stderr)
        return [{"engine": engine, "failed": str(error)[-200:]}]
    found: list[Json] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def save(args: argparse.Namespace, result: Json) -> None:
    (args.out / f"transformers-{args.model}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
