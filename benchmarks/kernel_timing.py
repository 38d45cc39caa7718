"""Timing on a GPU by CUDA-graph replay, and random paged batches with rotating buffers. Used by kernels_gpu.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.attention import Batch, KvLayer

COMPILE_ONLY = os.environ.get("KERNELS_COMPILE_ONLY") == "1"
L2_BYTES = 60e6


def replay_ms(calls: list[Callable[[], object]], target_ms: float = 2.0, budget_ms: float = 60.0) -> float:
    """Median milliseconds of one call: a graph of enough rounds over `calls` (different buffers), replayed."""
    if COMPILE_ONLY:
        calls[0]()
        torch.cuda.synchronize()
        return float("nan")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for call in calls[:2]:
            call()
        start.record()
        for call in calls[:4]:
            call()
        stop.record()
        stop.synchronize()
        one = max(start.elapsed_time(stop) / len(calls[:4]), 1e-3)
        count = max(len(calls) if one * len(calls) < 4 * target_ms else 1, min(400, int(target_ms / one)))
        count = max(count, 100 if one < 0.1 else 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for i in range(count):
                calls[i % len(calls)]()
        graph.replay()
        side.synchronize()
        times, began = [], time.time()
        while len(times) < 3 or (len(times) < 40 and (time.time() - began) * 1e3 < budget_ms):
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / count)
    torch.cuda.current_stream().wait_stream(side)
    return sorted(times)[len(times) // 2]


def warm_up(seconds: float = 0.7) -> None:
    """Bring the clocks up."""
    if not COMPILE_ONLY:
        a, began = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16), time.time()
        while time.time() - began < seconds:
            a @ a
            torch.cuda.synchronize()


@dataclass
class Paged:
    """Packed queries of ragged rows over shuffled blocks; `batches` have disjoint block tables, to rotate beyond L2."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv: KvLayer
    batches: list[Batch]
    rows: list[tuple[int, int]]

    def dense(self, row: int, which: int = 0) -> tuple[Tensor, Tensor]:
        """float32 keys and values [ctx, Hkv, D] of one row."""
        ctx, block = self.rows[row][1], self.kv.block_size
        at = torch.arange(ctx, device="cuda")
        blocks = self.batches[which].tables[0][row, at // block].long()
        return self.kv.k[blocks, :, at % block].float(), self.kv.v[blocks, :, at % block].float()


@dataclass(frozen=True)
class Heads:
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    layers: int = 0


def paged(
    rows: list[tuple[int, int]], heads: Heads, num_decode: int, *, replicas: int = 1, first_block: int = 1
) -> Paged:
    """rows: (new tokens, context). heads.layers > 0: block-major pool, a block holds so many layers' K and V."""
    block = heads.block_size
    per = [-(-ctx // block) for _, ctx in rows]
    num_blocks = sum(per) * replicas + first_block
    order = torch.randperm(sum(per) * replicas) + first_block
    tables, at = torch.zeros(replicas, len(rows), max(per) + 1, dtype=torch.int32), 0
    for which in range(replicas):
        for r, n in enumerate(per):
            tables[which, r, :n] = order[at : at + n].int()
            at += n
    new = torch.tensor([n for n, _ in rows])
    ctx = torch.tensor([c for _, c in rows])
    q_start = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)])
    total = int(q_start[-1])
    row_of = torch.repeat_interleave(torch.arange(len(rows)), new)
    position = torch.arange(total) - q_start[row_of] + (ctx - new)[row_of]
    tables, shape = tables.cuda(), (num_blocks, heads.num_kv_heads, block, heads.head_dim)
    if heads.layers:
        whole = torch.randn(num_blocks, heads.layers, 2, *shape[1:], device="cuda", dtype=heads.dtype)
        layer = KvLayer(whole[:, heads.layers // 2, 0], whole[:, heads.layers // 2, 1], block)
    else:
        pools = (torch.randn(shape, device="cuda", dtype=heads.dtype) for _ in range(2))
        layer = KvLayer(*pools, block)
    common = {"positions": position.cuda(), "q_start": q_start.int().cuda(), "ctx_len": ctx.int().cuda()}
    batches = [
        Batch(
            **common,
            slots=(tables[w, row_of, position // block].long() * block + (position % block).cuda(),),
            tables=(tables[w],),
            num_tokens=total,
            num_decode=num_decode,
            max_ctx=int(ctx.max()),
        )
        for w in range(replicas)
    ]

    def new_rows(num: int) -> Tensor:
        return torch.randn(total, num, heads.head_dim, device="cuda", dtype=heads.dtype)

    q, k, v = (new_rows(n) for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads))
    return Paged(q, k, v, layer, batches, rows)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm; NaN stays NaN."""
    return float((out.float() - reference.float()).norm() / reference.float().norm())
