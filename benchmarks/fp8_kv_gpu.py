"""fp8 KV against bf16 on one GPU: what is written and attended is checked, then writing and decode timed in turns.

Run: python3 benchmarks/fp8_kv_gpu.py OUT        rows go to OUT/fp8_kv.json; exit status 1: a check failed

Without a GPU (TRITON_INTERPRET=1) small shapes are checked and nothing is timed. The floor of a decode is the bytes of
K and V at 4.25 TB/s: half as many in fp8. The goal is 1.7 times the bf16 rate at 64 rows of 4k. An fp8 pool's decode
and writing have the keys' Hadamard basis in them, a bf16 pool's have not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from kernel_timing import replay_ms, warm_up

from steelyard.kernels import reference, triton_attention
from steelyard.kernels.attention import AttnSpec, Batch, KvLayer
from steelyard.kernels.kv_fp8 import FP8, as_bytes, hadamard, scale_for, to_stored
from steelyard.kernels.reference import ReferenceAttention
from steelyard.kernels.triton_attention import TritonAttention
from steelyard.kernels.triton_configs import AttentionShape, DecodeConfig, decode_config
from steelyard.kernels.triton_rope_kv import qk_norm_rope_write, write_kv

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BYTES_PER_US = 4.25e6
GOAL = 1.7
RAGGED = (
    [(1, 1), (1, 65), (1, 1023), (1, 2048), (5, 16), (129, 192), (200, 1200)] if GPU else [(1, 65), (1, 9), (20, 40)]
)
LIMIT = 5e-2
"""Largest difference over the root mean square: outputs are bfloat16."""
TIPPED = 1e-3 if GPU else 0.1
"""Share of stored bytes that may be a neighbour of torch's: sums in another order tip a number half way between two.
Triton's interpreter rounds numbers below 2^-6 and carries otherwise."""


@dataclass(frozen=True)
class Problem:
    """Rows over one layer's pool in shuffled blocks, in bf16 and quantised from the same numbers."""

    q: torch.Tensor
    wide: KvLayer
    fp8: KvLayer
    batches: list[Batch]
    shape: AttentionShape


def problem(rows: list[tuple[int, int]], shape: AttentionShape, replicas: int = 1) -> Problem:
    """The new tokens' K and V lie in the pool already; `batches` have disjoint tables, to rotate beyond the L2."""
    torch.manual_seed(0)
    block, per = shape.block_size, [-(-ctx // shape.block_size) for _, ctx in rows]
    num_blocks = sum(per) * replicas + 1
    order = (torch.randperm(num_blocks - 1) + 1).int()
    new, ctx = torch.tensor([n for n, _ in rows]), torch.tensor([c for _, c in rows])
    q_start = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)])
    total = int(q_start[-1])
    row_of = torch.repeat_interleave(torch.arange(len(rows)), new)
    position = torch.arange(total) - q_start[row_of] + (ctx - new)[row_of]
    batches = []
    for which in range(replicas):
        table = torch.zeros(len(rows), max(per) + 1, dtype=torch.int32)
        at = which * sum(per)
        for row, count in enumerate(per):
            table[row, :count] = order[at : at + count]
            at += count
        slots = table[row_of, position // block].long() * block + position % block
        batches.append(
            Batch(
                *(t.to(DEVICE) if torch.is_tensor(t) else (t[0].to(DEVICE),) for t in (position, (slots,))),
                q_start=q_start.int().to(DEVICE),
                ctx_len=ctx.int().to(DEVICE),
                tables=(table.to(DEVICE),),
                num_tokens=total,
                num_decode=sum(n == 1 for n, _ in rows),
                max_q=int(new.max()),
                max_ctx=int(ctx.max()),
            )
        )
    pools, scales, stored = [], [], []
    for is_key in (True, False):
        pool = torch.randn(num_blocks, shape.num_kv_heads, block, shape.head_dim, device=DEVICE, dtype=shape.dtype)
        pools.append(pool)
        held = hadamard(pool) if is_key else pool.float()
        scales.append(scale_for(held.abs().amax(dim=(0, 2, 3))))
        stored.append(to_stored(held.transpose(1, 2), scales[-1], FP8).transpose(1, 2).contiguous())
    q = torch.randn(total, shape.num_heads, shape.head_dim, device=DEVICE, dtype=shape.dtype)
    return Problem(q, KvLayer(*pools, block), KvLayer(*stored, block, *scales), batches, shape)


def attend(p: Problem, kv: KvLayer, spec: AttnSpec, poisoned: bool) -> Callable[[int], torch.Tensor]:
    """A call of the batch `which`; the output is NaN before it, or whatever was there."""
    attention = TritonAttention(replace(p.shape, is_fp8=kv.k_scale is not None, windows=(spec.window,)), DEVICE)
    attention.prepare(p.batches[0])

    shared = torch.empty_like(p.q)

    def call(which: int) -> torch.Tensor:
        out = torch.full_like(p.q, torch.nan) if poisoned else shared
        attention.forward(p.q, None, None, kv, p.batches[which], spec, out)
        return out

    return call


def exact(p: Problem, spec: AttnSpec) -> torch.Tensor:
    """The formula in float64 over the numbers that the fp8 pool stands for, keys in their own basis, on the CPU."""
    k, v = (
        held.cpu().double() * scale.cpu().double()[:, None, None]
        for held, scale in ((p.fp8.k, p.fp8.k_scale), (p.fp8.v, p.fp8.v_scale))
    )
    kv, b = KvLayer(hadamard(k), v, p.fp8.block_size), p.batches[0]
    batch = replace(b, q_start=b.q_start.cpu(), ctx_len=b.ctx_len.cpu(), tables=(b.tables[0].cpu(),))
    out = torch.full(p.q.shape, torch.nan, dtype=torch.float64)
    sinks = None if spec.sinks is None else spec.sinks.cpu()
    ReferenceAttention().forward(p.q.cpu().double(), None, out, kv, batch, replace(spec, sinks=sinks), out)
    return out


def check(name: str, shape: AttentionShape, spec: AttnSpec) -> dict[str, object]:
    """Error against float64 over the same quantised KV, and how many of 20 repeats are the same bits."""
    p = problem(RAGGED, shape)
    call, expected = attend(p, p.fp8, spec, True), exact(p, spec)
    first = call(0)
    error = float((first.double().cpu() - expected).abs().max() / expected.square().mean().sqrt())
    same = sum(torch.equal(call(0), first) for _ in range(20 if GPU else 1))
    return {"item": "check", "case": name, "error": error, "same": same, "ok": error < LIMIT and same in (1, 20)}


@dataclass(frozen=True)
class Tokens:
    """What a layer's writing kernels are given: packed projections, where they go, and a pool."""

    qkv: torch.Tensor
    heads: tuple[int, int, int]
    cos_sin: torch.Tensor
    slots: torch.Tensor
    block: int

    def pool(self, dtype: torch.dtype) -> KvLayer:
        """Zeros of one layer; an fp8 one with scales."""
        num_heads, dim = self.heads[1:]
        shape = (-(-self.slots.numel() // self.block) + 1, num_heads, self.block, dim)
        size = torch.uint8 if dtype == FP8 else dtype
        k, v = (torch.zeros(shape, dtype=size, device=DEVICE).view(dtype) for _ in range(2))
        scale = torch.full((num_heads,), 0.125, device=DEVICE) if dtype == FP8 else None
        return KvLayer(k, v, self.block, scale, scale)

    def fused(self, kv: KvLayer) -> None:
        """Turn q and k where they are, write k and v."""
        qk_norm_rope_write(self.qkv, self.heads, self.cos_sin, kv=(kv, self.slots))

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as they are now."""
        num_q, num_kv, dim = self.heads
        _, k, v = self.qkv.unflatten(1, (-1, dim)).split([num_q, num_kv, num_kv], 1)
        return k, v


def tokens(count: int, heads: tuple[int, int, int], rot: int, dtype: torch.dtype, block: int = 64) -> Tokens:
    """`count` random ones; `rot` dimensions of a head turn."""
    torch.manual_seed(rot)
    qkv = torch.randn(count, (heads[0] + 2 * heads[1]) * heads[2], device=DEVICE).to(dtype) * 3
    angles = torch.rand(count, rot // 2, device=DEVICE) * 6
    slots = torch.randperm(count, device=DEVICE) + block
    return Tokens(qkv, heads, torch.cat([angles.cos(), angles.sin()], 1), slots, block)


def stored(count: int, heads: tuple[int, int, int], rot: int, dtype: torch.dtype) -> dict[str, object]:
    """Both kernels that write keys leave the same bytes, and the torch twin's but for those that were tipped."""
    given = tokens(count, heads, rot, dtype)
    fused, alone, twin = (given.pool(FP8) for _ in range(3))
    given.fused(fused)
    k, v = given.kv
    write_kv(k, v, alone, given.slots)
    reference.write_kv(k, v, twin, given.slots)
    same = torch.equal(as_bytes(fused.k), as_bytes(alone.k)) and torch.equal(as_bytes(fused.v), as_bytes(alone.v))
    at = (given.slots // given.block, slice(None), given.slots % given.block)
    differ = (as_bytes(a)[at] != as_bytes(b)[at] for a, b in ((fused.k, twin.k), (fused.v, twin.v)))
    tipped = max(float(each.float().mean()) for each in differ)
    case = f"{count} keys of {heads[2]} stored, {rot} turned, {str(dtype)[6:]}"
    is_any = bool(as_bytes(fused.k).any())
    return {"item": "check", "case": case, "tipped": tipped, "ok": same and is_any and tipped < TIPPED}


def far(shape: AttentionShape) -> dict[str, object]:
    """The same blocks behind 2^31 bytes of others: the same bits."""
    p, spec = problem(RAGGED, shape), AttnSpec(0.09)
    first = 2**31 // p.fp8.k[0].numel() + 1 if GPU else 5

    def moved(near: torch.Tensor) -> torch.Tensor:
        pool = torch.zeros(first + near.shape[0], *near.shape[1:], dtype=torch.uint8, device=DEVICE)
        pool[first:] = near.view(torch.uint8)
        return pool.view(FP8)

    table = p.batches[0].tables[0]
    batch = replace(p.batches[0], tables=(torch.where(table > 0, table + first, table),))
    moved_kv = replace(p.fp8, k=moved(p.fp8.k), v=moved(p.fp8.v))
    outs = [attend(x, x.fp8, spec, True)(0) for x in (p, replace(p, fp8=moved_kv, batches=[batch]))]
    return {"item": "check", "case": f"pool of {moved_kv.k.numel():,}", "ok": torch.equal(*outs)}


def checks() -> list[dict[str, object]]:
    """Blocks, head sizes, groups, and the options of a layer."""
    sizes = {"max_rows": 64, "max_tokens": 1024}
    found = []
    for heads, kv_heads, dim, block in ((32, 8, 128, 64), (9, 3, 64, 16), (8, 4, 256, 64)):
        shape = AttentionShape(heads, kv_heads, dim, block, **sizes)
        found.append(check(f"{heads} on {kv_heads}, {dim}, blocks of {block}", shape, AttnSpec(dim**-0.5)))
    sinks = torch.randn(32, device=DEVICE)
    shape = AttentionShape(32, 8, 128, 64, **sizes)
    found.append(check("window, cap, sinks", shape, AttnSpec(0.09, window=100, softcap=20.0, sinks=sinks)))
    found += [far(shape), far(AttentionShape(9, 3, 64, 16, **sizes))]
    bounded = replace(shape, keep_first=5)
    found.append(check("bounded", bounded, AttnSpec(0.09, window=100 if GPU else 18, keep_first=5)))
    for dim, rot, dtype in (
        (64, 64, torch.bfloat16), (80, 32, torch.float16), (96, 96, torch.bfloat16), (128, 128, torch.bfloat16),
        (128, 64, torch.float32), (256, 256, torch.bfloat16),
    ):  # fmt: skip
        found += [stored(count, (4, 2, dim), rot, dtype) for count in ((3, 500) if GPU else (3,))]
    return found


def writing(count: int) -> list[dict[str, object]]:
    """One layer's turn and write over either pool, and the write alone, in turns, three times; the medians."""
    given = tokens(count, (32, 8, 128), 128, torch.bfloat16)
    pools = {"bf16": given.pool(torch.bfloat16), "fp8": given.pool(FP8)}
    k, v = given.kv
    calls = {
        (kernel, name): (lambda kv=kv: given.fused(kv)) if kernel == "rope_kv" else (lambda kv=kv: alone(kv))
        for kernel in ("rope_kv", "kv_write")
        for name, kv in pools.items()
    }

    def alone(kv: KvLayer) -> None:
        write_kv(k, v, kv, given.slots)

    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(3):
        for key, call in calls.items():
            times[key].append(1e3 * replay_ms([call]))
    return [
        {"item": kernel, "tokens": count, "pool": name, "us": sorted(each)[1]}
        | {"of_bf16_time": sorted(each)[1] / sorted(times[kernel, "bf16"])[1]}
        for (kernel, name), each in times.items()
    ]


def forms(shape: AttentionShape, rows: int) -> dict[str, DecodeConfig]:
    """The shipped form, and those worth comparing."""
    shipped = decode_config(replace(shape, is_fp8=True), rows)
    return {
        "shipped": shipped,
        "as many registers as wanted": replace(shipped, max_registers=None, stages=4),
        "one buffer": replace(shipped, max_registers=None, carry=False),
        "tiles of 128": replace(shipped, max_registers=None, tile=128),
    }


def decode(rows: int, ctx: int) -> list[dict[str, object]]:
    """bf16 and each fp8 form in turns, three times; the medians."""
    shape = AttentionShape(32, 8, 128, 64, max_rows=256, max_tokens=1024)
    p, spec = problem([(1, ctx)] * rows, shape, replicas=2), AttnSpec(0.09)
    configs = {"bf16": decode_config(shape, rows)} | forms(shape, rows)
    times: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(3):
        for name, config in configs.items():
            triton_attention.decode_config = lambda *_, config=config: config
            call = attend(p, p.wide if name == "bf16" else p.fp8, spec, False)
            times[name].append(1e3 * replay_ms([lambda call=call, which=which: call(which) for which in (0, 1)]))
    triton_attention.decode_config = decode_config
    found = []
    for name, each in times.items():
        size = rows * ctx * 8 * 128 * 2 * (2 if name == "bf16" else 1)
        us, base = sorted(each)[1], sorted(times["bf16"])[1]
        row = {"item": "decode", "rows": rows, "ctx": ctx, "form": name, "us": us, "floor_us": size / BYTES_PER_US}
        found.append(row | {"tb_s": size / us / 1e6, "of_bf16_rate": base / us, "goal": GOAL})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the rows")
    folder = parser.parse_args().out
    rows = checks()
    if GPU:
        warm_up()
        for shape in ((64, 4096), (64, 1024), (8, 4096), (64, 256), (1, 4096)):
            rows += decode(*shape)
        for count in (1, 64, 2048, 8192):
            rows += writing(count)
    for row in rows:
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if GPU else "interpreter"
    (folder / "fp8_kv.json").write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
