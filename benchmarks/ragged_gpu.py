"""Decode attention over rows of uneven lengths, in the parts that are shipped and in those of even rows, on one GPU.

    python3 benchmarks/ragged_gpu.py OUT

Each line: contexts of one kind, the floor (bytes at 4.25 TB/s), microseconds with uneven rows in finer parts (the rule
of kernels/triton_plan) and with every row as if all were even (`--finer 1`: a process of its own, since the number is
compiled in). Rows go to OUT/h200_ragged.json.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import kernel_timing as timing
import torch
import triton.language as tl
from kernel_timing import Heads, paged, replay_ms

from steelyard.kernels import triton_plan
from steelyard.kernels.attention import AttnSpec
from steelyard.kernels.triton_attention import TritonAttention
from steelyard.kernels.triton_configs import AttentionShape
from steelyard.perf.environment import environment

BYTES_PER_US = 4.25e6
NUM_ROWS = (8, 32, 64, 128, 256)
FINER, EVEN = triton_plan.FINER.value, 1


def contexts(num_rows: int) -> Iterator[tuple[str, list[int]]]:
    """Lengths of rows by kind; the third are those of the four groups of `bench`."""
    rng = random.Random(num_rows)
    yield "even", [2048] * num_rows
    yield "uniform 100 to 4,000", [rng.randint(100, 4000) for _ in range(num_rows)]
    yield "four groups", [rng.choice((320, 4160, 770, 4600)) for _ in range(num_rows)]
    yield "600, one of 32,000", [600] * (num_rows // 2) + [32000] + [600] * (num_rows - num_rows // 2 - 1)


def microseconds(heads: Heads, lens: list[int]) -> float:
    """Of one call: a graph over replicas of the pool that do not fit the L2."""
    size = sum(lens) * heads.num_kv_heads * heads.head_dim * 4
    torch.manual_seed(1)
    p = paged([(1, n) for n in lens], heads, len(lens), replicas=max(2, min(16, int(400e6 // size))))
    shape = AttentionShape(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.block_size, max(NUM_ROWS), 8192)
    attention, out = TritonAttention(shape, torch.device("cuda"), pdl=True), torch.empty_like(p.q)
    attention.prepare(p.batches[0])
    calls = [lambda b=b: attention.forward(p.q, None, None, p.kv, b, AttnSpec(0.09), out) for b in p.batches]
    return replay_ms(calls, target_ms=1.0) * 1e3


def measured(finer: int) -> list[dict[str, object]]:
    """Every kind of contexts, with uneven rows in `finer` times the parts."""
    triton_plan.FINER = tl.constexpr(finer)
    timing.warm_up()
    rows: list[dict[str, object]] = []
    for heads in (Heads(), Heads(num_heads=16)):
        for num_rows in NUM_ROWS:
            for kind, lens in contexts(num_rows):
                floor_us = sum(lens) * heads.num_kv_heads * heads.head_dim * 4 / BYTES_PER_US
                row = {"heads": heads.num_heads, "rows": num_rows, "contexts": kind, "floor_us": floor_us}
                rows.append(row | {"us": microseconds(heads, lens)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--finer", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.finer:
        print(json.dumps(measured(args.finer)))
        return 0
    found = []
    for finer in (EVEN, FINER):
        command = [sys.executable, __file__, str(args.out), "--finer", str(finer)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    rows = found[0]
    for row, finer in zip(*found, strict=True):
        row["as_even_us"], row["finer_us"] = row.pop("us"), finer["us"]
    print(*rows, sep="\n", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(), "rows": rows}
    (args.out / "h200_ragged.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
