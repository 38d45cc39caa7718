"""The attention laboratory on one GPU, in one call: is the gradient right, does it repeat, how fast is it.

    PYTHONPATH=src python3 benchmarks/attention_lab_gpu.py --out results.json            about two minutes
    PYTHONPATH=src python3 benchmarks/attention_lab_gpu.py --sweep --out sweep.json      tile shapes, about two minutes

Needs torch with CUDA and Triton, nothing else. Stops by itself at --seconds; what it has by then is written.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from steelyard.kernels import flash_autograd
from steelyard.kernels.flash_autograd import FlashSpec, Tile, flash_attention, tiles_for
from steelyard.perf.attention_cases import AttentionCase
from steelyard.perf.environment import environment
from steelyard.perf.kernel_bench import Row, run_bench
from steelyard.perf.kernel_report import case_line, row_line, to_html, to_json
from steelyard.perf.timing import median_ms, own_stream

CUDA = torch.device("cuda")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
CHECKS = {
    "causal": (((257, 1000), (257, 1000)), (8, 8), 128, FlashSpec(causal=True)),
    "causal, grouped heads": (((1, 300, 129), (77, 300, 400)), (8, 2), 128, FlashSpec(causal=True)),
    "full, head size 64": (((300,), (513,)), (4, 4), 64, FlashSpec()),
    "window": (((700,), (700,)), (4, 2), 64, FlashSpec(causal=True, window=150)),
    "head size 80": (((200,), (333,)), (4, 2), 80, FlashSpec(causal=True)),
    "head size 256": (((300,), (300,)), (4, 2), 256, FlashSpec(causal=True)),
    "more queries than keys": (((300,), (100,)), (2, 2), 64, FlashSpec(causal=True)),
}
KEY_TILES = (Tile(32, 128, 8, 3), Tile(32, 128, 8, 2), Tile(64, 128, 8, 2), Tile(64, 128, 8, 3), Tile(64, 64, 4, 2))
QUERY_TILES = (Tile(128, 64, 8, 2), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(128, 128, 8, 2))
FORWARD_TILES = (Tile(128, 64, 8, 2, 128), Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(128, 128, 8, 3))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=Path("attention-lab.json"))
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--sweep", action="store_true", help="time tile shapes instead of comparing backends")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(JOBS[args.one]()))
        return
    end = time.monotonic() + args.seconds
    result = {"environment": environment(), "checks": run_jobs()}
    write(args.out, result)
    if args.sweep:
        result["sweep"] = sweep(end, args.out, result)
    else:
        compare(end, args.out, result)
    write(args.out, result)


def write(path: Path, result: dict) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def run_jobs() -> dict[str, object]:
    """Every check in a process of its own, all at once: what takes time is compiling, which one core does alone."""
    command = [sys.executable, __file__, "--one"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = {name: subprocess.Popen([*command, name], **pipes) for name in JOBS}
    found: dict[str, object] = {}
    for name, process in running.items():
        out, err = process.communicate()
        found[name] = json.loads(out.splitlines()[-1]) if process.returncode == 0 else {"failed": err[-2000:]}
        print(f"{name:<34}{json.dumps(found[name])[:200]}", flush=True)
    return found


def check(name: str, dtype: torch.dtype, limit: float) -> dict:
    """Relative and largest errors of output and gradients against float64 autograd of the formula."""
    errors = errors_of(*CHECKS[name], dtype)
    return {"ok": all(error["relative"] <= limit for error in errors.values()), "limit": limit, "errors": errors}


def compile_for_bench(head_dim: int) -> dict:
    """Leave in Triton's cache what `compare` will launch."""
    shape = (1, 256, 2048 // head_dim, head_dim)
    leaves = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    flash_attention(*leaves, FlashSpec(causal=True)).sum().backward()
    return {}


def errors_of(lengths: tuple, heads: tuple[int, int], head_dim: int, spec: FlashSpec, dtype: torch.dtype) -> dict:
    num_q, num_k = lengths
    torch.manual_seed(0)
    shapes = [(sum(num_q), heads[0]), (sum(num_k), heads[1]), (sum(num_k), heads[1]), (sum(num_q), heads[0])]
    *inputs, grad = [torch.randn(*shape, head_dim, device=CUDA).to(dtype) for shape in shapes]
    cu = tuple(torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=CUDA) for n in (num_q, num_k))
    ours = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    out, want = flash_attention(*ours, spec, cu), formula(exact, lengths, spec)
    out.backward(grad)
    want.backward(grad.double())
    pairs = {"out": (out, want)} | {n: (x.grad, y.grad) for n, x, y in zip(("dq", "dk", "dv"), ours, exact)}
    return {name: distance(x.detach().double(), y.detach()) for name, (x, y) in pairs.items()}


def distance(x: Tensor, y: Tensor) -> dict[str, float]:
    difference = x - y
    scale = float(y.abs().max())
    return {"relative": float(difference.norm() / y.norm()), "largest": float(difference.abs().max()) / scale}


def formula(inputs: list[Tensor], lengths: tuple, spec: FlashSpec) -> Tensor:
    q, k, v = inputs
    parts, at_q, at_k, group = [], 0, 0, q.shape[1] // k.shape[1]
    for num_q, num_k in zip(*lengths):
        keys, values = (x[at_k : at_k + num_k].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[at_q : at_q + num_q], keys) * q.shape[2] ** -0.5
        position = torch.arange(num_q, device=CUDA)[:, None] + num_k - num_q
        key = torch.arange(num_k, device=CUDA)[None, :]
        seen = key <= position if spec.causal else torch.ones_like(key <= position)
        if spec.window is not None:
            seen = seen & (key > position - spec.window)
        weights = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
        at_q, at_k = at_q + num_q, at_k + num_k
    return torch.cat(parts)


def repeats(head_dim: int, times: int = 50) -> dict:
    """The same output and gradient again and again: how many differ in a bit. Races show here, not in a tolerance."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2000, n, head_dim, device=CUDA, dtype=torch.bfloat16) for n in (8, 2, 2))
    grad, first, count = torch.randn_like(q), None, 0
    for _ in range(times):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash_attention(*leaves, FlashSpec(causal=True, dropout_p=0.1, seed=5))
        now = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        first = first or now
        count += not all(torch.equal(a, b) for a, b in zip(first, now))
    return {"times": times, "different": count}


JOBS: dict[str, Callable[[], dict]] = {
    **{f"{name}, bfloat16": partial(check, name, torch.bfloat16, 1e-2) for name in CHECKS},
    "causal, float16": partial(check, "causal", torch.float16, 2e-3),
    "full, head size 64, float32": partial(check, "full, head size 64", torch.float32, 1e-5),
    **{f"repeats, head size {head_dim}": partial(repeats, head_dim) for head_dim in (64, 128, 256)},
    **{f"compile, head size {head_dim}": partial(compile_for_bench, head_dim) for head_dim in (64, 128)},
}
"""Each runs in a process of its own and prints one line of JSON."""


def compare(end: float, out: Path, result: dict) -> None:
    """Forward and backward of every attention, 16k tokens a case. Rows are written as they come."""
    backends = ("naive", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "steelyard", "steelyard-train", "flashinfer")
    above, rows = [""], []

    def show(row: Row) -> None:
        if case_line(row) != above[0]:
            above[0] = case_line(row)
            print(above[0])
            write(out, result | {"rows": rows})
        rows.append(row.to_dict())
        print(row_line(row), flush=True)

    report = run_bench(cases_until(end), backends, ("forward", "backward"), CUDA, show)
    result["kernels"] = json.loads(to_json(report))
    out.with_suffix(".html").write_text(to_html(report))


def cases_until(end: float) -> Iterator[AttentionCase]:
    """Longest first within a head size: what matters most is measured if time runs out."""
    for head_dim in (128, 64):
        heads = 2048 // head_dim
        for length in sorted(LENGTHS, reverse=True):
            if time.monotonic() > end and (head_dim, length) != (128, max(LENGTHS)):
                print(f"out of time before head size {head_dim}, length {length}")
                return
            yield AttentionCase(TOKENS // length, length, length, heads, heads, head_dim, True, torch.bfloat16)


def sweep(end: float, out: Path, result: dict) -> list[dict]:
    """Milliseconds of forward and backward with one kernel's tile changed at a time, causal, 2 x 8k."""
    rows: list[dict] = []
    choose = tiles_for
    for head_dim in (128, 64):
        heads = 2048 // head_dim
        for grouped in (1, 4):
            shapes = [(2, 8192, heads), (2, 8192, heads // grouped), (2, 8192, heads // grouped)]
            q, k, v = (torch.randn(*s, head_dim, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
            grad, base = torch.randn_like(q), choose(head_dim, torch.bfloat16)
            flops = 2 * 4 * heads * head_dim * 8192**2 / 2
            for part, tiles in (("keys", KEY_TILES), ("queries", QUERY_TILES), ("forward", FORWARD_TILES)):
                for tile in tiles:
                    if time.monotonic() > end:
                        return rows
                    changed = replace(base, **{part: tile})
                    flash_autograd.tiles_for = lambda *_, changed=changed: changed
                    row = {"head_dim": head_dim, "group": grouped, "kernel": part, "tile": asdict(tile)}
                    try:
                        with own_stream(CUDA):
                            row |= timed(q, k, v, grad, part == "forward", flops)
                    except Exception as error:  # a tile that does not fit is a result
                        row["error"] = str(error).splitlines()[0][:200]
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    write(out, result | {"sweep": rows})
    flash_autograd.tiles_for = choose
    return rows


def timed(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, is_forward: bool, flops: float) -> dict:
    spec = FlashSpec(causal=True)
    if is_forward:
        with torch.no_grad():
            ms = median_ms([lambda: flash_attention(q, k, v, spec)], CUDA)
        rate = flops / ms / 1e9
    else:
        kept = flash_attention(q, k, v, spec)
        ms = median_ms([lambda: torch.autograd.grad(kept, (q, k, v), grad, retain_graph=True)], CUDA)
        rate = 2.5 * flops / ms / 1e9
    return {"ms": ms, "tflops": rate, "finite": math.isfinite(ms)}


if __name__ == "__main__":
    main()
