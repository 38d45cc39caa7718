"""The whole engine on one GPU: correctness first, then every workload by name. Run: python3 benchmarks/h200.py OUT

    1  correct   float32 on the GPU against the plain CPU backend; graphs, overlap and chunks against each other
    2  models    each in a process of its own: cold start, single requests, offline workloads, batch curve, host time;
                 then a cold start again, with kernels that a process without a GPU has compiled

    --parts correct,qwen3-0.6b,llama3-8b   --cases "short-short,single 128"   --runs 3   --set max_num_seqs=512

Rows go to OUT/h200.json, step records to OUT/h200-steps.jsonl, what the host does in a step to OUT/host.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from steelyard.core.sampling import SamplingParams
from steelyard.kernels.reference import ReferenceBackend
from steelyard.layers.linear import Place
from steelyard.llm import LLM
from steelyard.models.decoder import Decoder
from steelyard.models.families import decoder_config
from steelyard.perf.steps import append_jsonl, thin
from steelyard.perf.throughput import Run, batch_case, batch_point, record_steps, roofline_of, run_case
from steelyard.perf.workloads import case_names, find_case, write_config

WHOLE = ("single 128/257", "short-short 256/128")
SAMPLE_STEPS = 400
SINGLE_RUNS = 5
FLOAT32_TIE, BFLOAT16_TIE = 2e-3, 0.25
"""Log-probabilities closer than this may change places: bfloat16 logits of the small models are off by about 1 %."""
LENS = (1, 17, 64, 100, 300, 600, 5, 33)
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
}


# correctness


def small_model(folder: Path, name: str) -> Path:
    """A random model of four layers with wide weights, as a checkpoint."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 2000, "hidden_size": 384, "intermediate_size": 640,
        "num_hidden_layers": 4, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
    } | SMALL[name]  # fmt: skip
    place = folder / name
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    decoder = Decoder(decoder_config(config), Place(torch.float32, torch.device("cpu"), ReferenceBackend()), 2048)
    torch.manual_seed(3)
    tensors = {}
    for key, target in decoder.targets().items():
        one = key.endswith("norm.weight")
        tensors[key] = torch.ones(target.view.shape) if one else torch.randn(target.view.shape) * 0.08
    save_file(tensors, place / "model.safetensors")
    return place


def greedy(model: Path, prompts: list[list[int]], **options: Any) -> tuple[LLM, list[tuple[int, ...]]]:
    base = {"max_model_len": 2048, "skip_tokenizer_init": True, "num_gpu_blocks_override": 400, "block_size": 64}
    llm = LLM(str(model), **(base | options))
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    return llm, [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def compare(
    judge: LLM, prompts: list[list[int]], expected: list[tuple[int, ...]], found: list[tuple[int, ...]], tie: float
) -> dict[str, Any]:
    """Where two runs part, and by how much the judge prefers one token over the other there."""
    gaps = []
    for prompt, a, b in zip(prompts, expected, found):
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if at is None:
            continue
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20)
        output = judge.generate([[*prompt, *a[:at]]], params)[0].outputs[0]
        assert output.logprobs is not None
        top = dict(output.logprobs[0].top)
        gaps.append(abs(top.get(a[at], 99.0) - top.get(b[at], -99.0)))
    return {"parted": len(gaps), "of": len(prompts), "gaps": gaps, "ok": all(gap < tie for gap in gaps)}


def correct(folder: Path) -> list[dict[str, Any]]:
    """Each line: two ways of running the same requests, and where they part."""
    torch.manual_seed(0)
    prompts = [torch.randint(0, 2000, (n,)).tolist() for n in LENS]
    ways: dict[str, dict[str, Any]] = {
        "default": {}, "eager": {"enforce_eager": True}, "no overlap": {"async_scheduling": False},
        "chunked": {"max_num_batched_tokens": 96}, "blocks of 16": {"block_size": 16}, "one row": {"max_num_seqs": 1},
    }  # fmt: skip
    rows = []
    for name in SMALL:
        model = small_model(folder, name)
        judge, expected = greedy(model, prompts, device="cpu", dtype="float32")
        for dtype, tie in (("float32", FLOAT32_TIE), ("bfloat16", BFLOAT16_TIE)):
            base: list[tuple[int, ...]] | None = None
            for way, options in ways.items():
                llm, found = greedy(model, prompts, device="cuda", dtype=dtype, **options)
                against = expected if dtype == "float32" else base or expected
                row = {"model": name, "dtype": dtype, "way": way, **compare(judge, prompts, against, found, tie)}
                base = base or found
                rows.append(row)
                print(row, flush=True)
                del llm
    return rows


# speed


class HostClock:
    """Microseconds of host time in the parts of a step, by rows of the step; only decodes are kept."""

    def __init__(self, llm: LLM) -> None:
        self.times: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        engine = llm.engine
        self._rows = 0
        self._restore: list[Callable[[], None]] = []
        for owner, name in (
            (engine.scheduler, "schedule"), (engine.runner, "launch"), (engine.runner, "collect"),
            (engine.scheduler, "commit"), (engine, "_messages"), (engine, "step"),
        ):  # fmt: skip
            self._wrap(owner, name)

    def _wrap(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any) -> Any:
            began = time.perf_counter_ns()
            result = call(*args)
            took = (time.perf_counter_ns() - began) / 1e3
            if name == "schedule":
                is_decode = result is not None and result.num_tokens == len(result.work)
                self._rows = len(result.work) if is_decode else 0
            if self._rows:
                self.times[self._rows][name].append(took)
            return result

        setattr(owner, name, timed)
        self._restore.append(lambda: delattr(owner, name) if name in vars(owner) else None)

    def stop(self) -> dict[str, Any]:
        for restore in self._restore:
            restore()
        rows = max(self.times, key=lambda r: len(self.times[r]["launch"]), default=0)
        return {"rows": rows, **{k: round(statistics.median(v), 1) for k, v in self.times[rows].items() if v}}


def profile(llm: LLM, recorder: Any) -> list[str]:
    """The kernels of a short run with many rows, by their share of device time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    case = batch_case(llm.engine.scheduler.max_num_seqs, 256, 12)
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        run_case(llm, case, recorder)
    events = sorted(found.key_averages(), key=lambda e: -e.device_time_total)[:22]
    return [f"{e.device_time_total / 1e3:9.2f} ms {e.count:6d} x {e.key[:100]}" for e in events]


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    fixed = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True}
    return fixed | {"max_model_len": 8192, "gpu_memory_utilization": 0.85} | dict(_option(text) for text in args.set)


def cold_start(args: argparse.Namespace, model: str, **more: Any) -> tuple[LLM, dict[str, Any]]:
    """The engine after its first token, and what that took: from the process's begin, and by phase."""
    imported_s = time.time() - args.began
    began = time.perf_counter()
    llm = LLM(str(write_config(model, args.out / "models")), **engine_options(args), **more)
    startup_s = time.perf_counter() - began
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    cold_s, runner = time.time() - args.began, llm.engine.runner
    phases = {"import": imported_s, **llm.engine.options.start_seconds}
    kernels = getattr(runner, "kernels", {})
    print(f"{model}: start {startup_s:.2f} s, to first token {cold_s:.2f} s, {phases}, {kernels}", flush=True)
    return llm, {"startup_s": startup_s, "cold_start_s": cold_s, "phases": phases, "kernels": kernels}


def compile_without_gpu(args: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """The model's kernels into `folder`, by a process that sees no GPU; what it says of them."""
    command = [sys.executable, "-m", "steelyard.cli.main", "compile", str(write_config(model, args.out / "models"))]
    for name, value in engine_options(args).items():
        flag = name.replace("_", "-")
        command += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    command += ["--arch", args.arch, "--kernel-cache", str(folder), "--json"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    made = json.loads(subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE).stdout)
    return {"kernels": sum(made["compiled"].values()), "seconds": made["seconds"], "bytes": made["bytes"]}


def ahead_start(args: argparse.Namespace, model: str) -> None:
    """A cold start of this process with the kernels of args.ahead: one row."""
    _, start = cold_start(args, model, kernel_cache=str(args.ahead))
    row = {
        "model": model,
        "case": "start with kernels compiled ahead",
        "ahead_start_s": start["cold_start_s"],
        "phases": start["phases"],
        "kernels_compiled": start["kernels"]["compiled"],
        "kernels_from_cache": start["kernels"]["from_cache"],
        "compiled_ahead": json.loads((args.ahead / "made.json").read_text()),
    }
    append_jsonl(args.out / "rows.jsonl", [row | _stamp(args)])


def measure(args: argparse.Namespace, model: str) -> None:
    """One model in this process; rows and records are appended to files in OUT."""
    llm, start = cold_start(args, model)
    recorder = record_steps(llm)
    rows, steps = [], []
    for name in args.cases:
        case = find_case(name)
        num_runs = max(args.runs, SINGLE_RUNS) if len(case.lens) == 1 else args.runs
        runs = [run_case(llm, case, recorder) for _ in range(num_runs)]
        records = recorder.named(f"{model} {case.name}")
        steps += records if case.name in WHOLE else thin(records, SAMPLE_STEPS)
        rows.append(_row(args, model, case.name, runs) | start)
        print(
            {k: v for k, v in rows[-1].items() if k not in ("phases", "kernels", "commit", "torch", "triton")},
            flush=True,
        )
    roofline = roofline_of(llm, model)
    for batch in args.batches:
        run_case(llm, batch_case(batch, 1024, 40), recorder)
        point = asdict(batch_point(recorder, batch, roofline))
        steps += thin(recorder.named(f"{model} batch {batch}"), 60)
        rows.append({"model": model, "case": f"batch {batch} at 1k", **point, **_stamp(args)})
        print({k: round(v, 4) if v is not None else None for k, v in point.items()}, flush=True)
    for case in (batch_case(256, 1024, 40), find_case("short-short")) if args.host else ():
        clock = HostClock(llm)
        run_case(llm, case, recorder)
        rows.append({"model": model, "case": "host us of a decode step", "host_us": clock.stop(), **_stamp(args)})
        print(rows[-1], flush=True)
    if args.profile:
        print("\n".join(profile(llm, recorder)), flush=True)
    append_jsonl(args.out / "h200-steps.jsonl", steps)
    append_jsonl(args.out / "rows.jsonl", rows)


def _row(args: argparse.Namespace, model: str, case: str, runs: list[Run]) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    row: dict[str, Any] = {"model": model, "case": case}
    if case.startswith("single"):
        row |= {"ttft_ms": statistics.median(r.first_s for r in runs) * 1e3}
        row |= {"tpot_ms": statistics.median(r.tpot_s for r in runs) * 1e3}
    row |= {
        "seconds": middle.seconds,
        "all_seconds": seconds,
        "out_tok_s": middle.output_tokens / middle.seconds,
        "steps": middle.steps,
        "graphed": middle.graphed,
        "device_s": middle.device_s,
        "gap_s": middle.gap_s,
        "ids_sha256": middle.ids_sha256,
        "same_ids": len({run.ids_sha256 for run in runs}) == 1,
    }
    return row | _stamp(args)


def _stamp(args: argparse.Namespace) -> dict[str, Any]:
    import triton

    return {
        "commit": args.commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "options": args.set,
    }


def _option(text: str) -> tuple[str, Any]:
    name, value = text.split("=")
    return name, json.loads(value)


def cold(command: list[str]) -> int:
    """A process of ours that finds no kernel of another one; its status."""
    with tempfile.TemporaryDirectory() as kernels:
        environment = os.environ | {"TRITON_CACHE_DIR": kernels}
        began = ["--began", str(time.time())]
        return subprocess.run([sys.executable, *command, *began], check=False, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="correct,qwen3-0.6b,llama3-8b")
    parser.add_argument("--cases", default=",".join([*case_names("single"), *case_names("offline")]))
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=JSON")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--arch", default="sm_90", help="to compile kernels ahead for; empty: leave that start out")
    parser.add_argument("--ahead", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only:
        args.cases = [c for c in args.cases.split(",") if c]
        args.batches = [int(b) for b in args.batches.split(",") if b]
        if args.only == "correct":
            found = correct(args.out / "models")
            append_jsonl(args.out / "rows.jsonl", [{"case": "correct", "rows": found, **_stamp(args)}])
        elif args.ahead:
            ahead_start(args, args.only)
        else:
            measure(args, args.only)
        return 0
    failures = 0
    for part in args.parts.split(","):
        failures += cold([*sys.argv, "--only", part]) != 0
        if part != "correct" and args.arch:
            with tempfile.TemporaryDirectory() as ahead:
                made = compile_without_gpu(args, part, Path(ahead))
                print(f"{part}: compiled ahead for {args.arch}: {made}", flush=True)
                (Path(ahead) / "made.json").write_text(json.dumps(made))
                failures += cold([*sys.argv, "--only", part, "--ahead", ahead]) != 0
    lines = (args.out / "rows.jsonl").read_text().splitlines()
    (args.out / "h200.json").write_text(json.dumps([json.loads(line) for line in lines], indent=1) + "\n")
    return failures


if __name__ == "__main__":
    sys.exit(main())
