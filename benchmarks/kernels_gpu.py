"""Checks and times every kernel on one GPU, each result beside its floor. Run: python3 benchmarks/kernels_gpu.py OUT

    1  all groups at once, compile only (in parallel processes: compiling is most of the time of a cold machine)
    2  checks      against float32 torch, outputs poisoned, 20 repeats bit for bit
    3  timings     one group after another, by graph replay over buffers that do not fit the L2

Rows go to OUT/kernels_h200.json with the environment. Floors: bytes at 4.25 TB/s, matrix products at 700 TFLOP/s, the
copy and product rates measured on an H200.
"""

# ruff: noqa: B023  the timed calls run before their loop goes on

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import kernel_timing as timing
import torch
import torch.nn.functional as F
from kernel_timing import Heads, Paged, paged, relative_error, replay_ms

from steelyard.kernels import reference, triton_attention
from steelyard.kernels.attention import AttnSpec, KvLayer
from steelyard.kernels.triton_act import gated
from steelyard.kernels.triton_attention import TritonAttention
from steelyard.kernels.triton_configs import AttentionShape, DecodeConfig, decode_config
from steelyard.kernels.triton_linear import Fused, gemv
from steelyard.kernels.triton_moe import ExpertLayer, ExpertWeights
from steelyard.kernels.triton_norm import rms_norm
from steelyard.kernels.triton_rope_kv import qk_norm_rope_write
from steelyard.kernels.triton_sample import Cut, Sampler, uniforms
from steelyard.kernels.triton_tiles_linear import tile_products
from steelyard.perf.environment import environment

BYTES_PER_US = 4.25e6
FLOPS_PER_US = 700e6
DECODE_SHAPES = [(1, 1024), (1, 8192), (8, 4096), (32, 1024), (64, 1024), (64, 4096), (256, 1024), (256, 2048)]
FLASHINFER_US = [9.4, 19.3, 42.6, 40.2, 73.9, 256, 267.9, 507.7]
PREFILL_SHAPES = {
    "16x1k": [(1024, 1024)] * 16,
    "4x4k": [(4096, 4096)] * 4,
    "1x16k": [(16384, 16384)],
    "2k on 14k": [(2048, 16384)],
}
FLASHINFER_TFLOPS = {"16x1k": 331, "4x4k": 477, "1x16k": 536, "2k on 14k": 528}
RAGGED = [(1, 1), (1, 64), (1, 65), (1, 1023), (1, 2048), (5, 16), (17, 17), (129, 192), (200, 1200), (300, 300)]
results: list[dict[str, object]] = []


def record(**row: object) -> None:
    """Keep and print one row."""
    if timing.COMPILE_ONLY:
        return
    results.append(row)
    print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def attention_for(heads: Heads, spec: AttnSpec | None = None, **options: bool) -> TritonAttention:
    shape = AttentionShape(
        heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.block_size, max_rows=1024, max_tokens=16384,
        windows=(spec.window if spec else None,), keep_first=spec.keep_first if spec else 0, dtype=heads.dtype,
    )  # fmt: skip
    return TritonAttention(shape, torch.device("cuda"), **options)


def reference_rows(p: Paged, spec: AttnSpec) -> torch.Tensor:
    """float32 attention of every row."""
    out, at = [], 0
    torch.set_default_device("cuda")
    for row, (new, _) in enumerate(p.rows):
        k, v = p.dense(row)
        sinks = None if spec.sinks is None else spec.sinks.float()
        out.append(reference.attend_row(p.q[at : at + new].float(), k, v, replace(spec, sinks=sinks))[0])
        at += new
    torch.set_default_device("cpu")
    return torch.cat(out)


def check_one(name: str, heads: Heads, spec: AttnSpec, rows: list[tuple[int, int]], **options: bool) -> None:
    num_decode = sum(new == 1 for new, _ in rows)
    p = paged(rows, heads, num_decode)
    attention = attention_for(heads, spec, **options)
    attention.prepare(p.batches[0])

    def run() -> torch.Tensor:
        out = torch.full_like(p.q, float("nan"))
        attention.forward(p.q, p.k, p.v, p.kv, p.batches[0], spec, out)
        return out

    first = run()
    torch.cuda.synchronize()
    if timing.COMPILE_ONLY:
        return
    expected = reference_rows(p, spec)
    same = sum(torch.equal(run(), first) for _ in range(20))
    worst = float((first.float() - expected).abs().max())
    record(item="check", case=name, relative=relative_error(first, expected), worst=worst, same_of_20=same)


def checks_a() -> None:
    """Both prefills and both decode merges, blocks, strides."""
    plain = AttnSpec(128**-0.5)
    for block in (16, 64, 128):
        for use_gluon in (True, False):
            name = f"b{block} gluon={use_gluon}"
            check_one(name, Heads(block_size=block), plain, RAGGED, use_gluon=use_gluon, pdl=block == 64)
    check_one("block-major", Heads(layers=3), plain, RAGGED)
    check_one("many rows", Heads(), plain, [(1, 50 + 7 * i) for i in range(300)] + [(1, 60000)])
    check_one("long context", Heads(), plain, [(1, 5000), (2000, 5000)])


def checks_b() -> None:
    """Other heads, sizes and options."""
    full = AttnSpec(0.09, window=100, softcap=20.0, sinks=torch.randn(32, device="cuda"))
    for use_gluon in (True, False):
        check_one(f"window, cap, sinks gluon={use_gluon}", Heads(), full, RAGGED, use_gluon=use_gluon)
    for heads in (Heads(9, 3, 64), Heads(32, 32, 80), Heads(14, 2, 96, 16), Heads(8, 4, 256), Heads(16, 8),
                  Heads(9, 3, 64, 16, torch.float32)):  # fmt: skip
        check_one(str(heads), heads, AttnSpec(heads.head_dim**-0.5), RAGGED)
    for heads in (Heads(), Heads(block_size=16), Heads(9, 3, 64), Heads(9, 3, 64, 16, torch.float32)):
        check_one(f"bounded, {heads}", heads, AttnSpec(heads.head_dim**-0.5, window=100, keep_first=5), RAGGED)
    check_one("not causal", Heads(), AttnSpec(0.09, causal=False), [(300, 300), (50, 700)])


def checks_c() -> None:
    """A pool past 2^31 elements, and a captured step that serves another batch of its bucket."""
    far = paged([(1, 700), (64, 900)], Heads(), 1, first_block=33000)
    near = paged([(1, 700), (64, 900)], Heads(), 1)
    spec = AttnSpec(0.09)
    for row in range(2):
        source, target = (x.batches[0].tables[0][row].long() for x in (far, near))
        used = source > 0
        near.kv.k[target[used]], near.kv.v[target[used]] = far.kv.k[source[used]], far.kv.v[source[used]]
    outs = []
    for use_gluon in (True, False):
        for p in (far, near):
            attention = attention_for(Heads(), use_gluon=use_gluon)
            attention.prepare(p.batches[0])
            out = torch.full_like(far.q, float("nan"))
            attention.forward(far.q, far.k, far.v, p.kv, p.batches[0], spec, out)
            outs.append(out)
    equal = torch.equal(outs[0], outs[1]) and torch.equal(outs[2], outs[3])
    record(item="check", case="pool past 2^31 elements", elements=far.kv.k.numel(), equal=equal)
    other = paged([(1, 30), (1, 2900), (1, 64), (200, 333), (1, 77)], Heads(), 3)
    p = paged([(1, 4000), (1, 20), (1, 3), (150, 150), (51, 51)], Heads(), 3)
    attention, out = attention_for(Heads(), pdl=True), torch.zeros_like(p.q)

    def step() -> None:
        attention.prepare(p.batches[0])
        attention.forward(p.q, p.k, p.v, p.kv, p.batches[0], spec, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    live, new = p.batches[0], other.batches[0]
    table = torch.zeros_like(live.tables[0])
    table[:, : new.tables[0].shape[1]] = new.tables[0]
    p.kv.k[: other.kv.k.shape[0]], p.kv.v[: other.kv.v.shape[0]] = other.kv.k, other.kv.v
    for to, source in ((live.q_start, new.q_start), (live.ctx_len, new.ctx_len), (live.tables[0], table),
                       (live.slots[0], new.slots[0])):  # fmt: skip
        to.copy_(source) if to.shape == source.shape else to[: len(source)].copy_(source)
    graph.replay()
    torch.cuda.synchronize()
    eager = torch.zeros_like(out)
    attention.prepare(new)
    attention.forward(p.q[: new.num_tokens], p.k, p.v, other.kv, new, spec, eager[: new.num_tokens])
    record(
        item="check",
        case="captured step, other batch",
        equal=torch.equal(out[: new.num_tokens], eager[: new.num_tokens]),
    )


def decode_forms(shape: AttentionShape, rows: int) -> dict[str, DecodeConfig]:
    """The shipped form, and the others worth comparing."""
    shipped = decode_config(shape, rows)
    crowd = {
        "64 one buffer": replace(shipped, tile=64, carry=False),
        "64 carried": replace(shipped, tile=64, carry=True),
    }
    others = {n: c for n, c in crowd.items() if c != shipped} if rows >= 32 else {}
    if rows < 32:
        others["never early"] = shipped
    return {"shipped": shipped, **others, "other merge": replace(shipped, merge_last=not shipped.merge_last)}


def decode() -> None:
    """Eight shapes, with the layer-major pool, blocks of 16, and the block-major pool of 32 layers at small sizes."""
    timing.warm_up()
    for (rows, ctx), library in zip(DECODE_SHAPES, FLASHINFER_US):
        size = rows * ctx * 8 * 128 * 4
        replicas = max(2, min(64, int(400e6 // size)))
        for label, heads in (("b64", Heads()), ("b16", Heads(block_size=16)), ("block-major", Heads(layers=4))):
            p = paged([(1, ctx)] * rows, heads, rows, replicas=replicas)
            out = torch.empty_like(p.q)
            forms = decode_forms(attention_for(heads).shape, rows)
            for form, config in forms.items() if label == "b64" else [("shipped", forms["shipped"])]:
                triton_attention.decode_config = lambda *_, config=config: config
                attention = attention_for(heads, pdl=form != "never early")
                attention.prepare(p.batches[0])
                calls = [
                    lambda b=b: attention.forward(p.q, None, None, p.kv, b, AttnSpec(0.09), out) for b in p.batches
                ]
                us = replay_ms(calls, target_ms=1.0) * 1e3
                record(item="decode", rows=rows, ctx=ctx, pool=label, form=form, us=us, floor_us=size / BYTES_PER_US,
                       tb_s=size / us / 1e6, of_flashinfer=library / us)  # fmt: skip
            triton_attention.decode_config = decode_config


def prefill() -> None:
    """Four shapes at head size 128, sustained; D = 64 and 256 for Triton."""
    timing.warm_up()
    for name, rows in PREFILL_SHAPES.items():
        for label, heads in (("b64", Heads()), ("block-major", Heads(layers=3)), ("b16", Heads(block_size=16)),
                             ("d64", Heads(head_dim=64)), ("d256", Heads(8, 4, 256))):  # fmt: skip
            p = paged(rows, heads, 0, replicas=2)
            flops = sum(4 * heads.num_heads * heads.head_dim * (q * (c - q) + q * q / 2) for q, c in rows)
            for form in ("gluon", "triton") if heads.head_dim == 128 else ("triton",):
                attention = attention_for(heads, use_gluon=form != "triton")
                attention.prepare(p.batches[0])
                outs = [torch.empty_like(p.q) for _ in range(2)]
                calls = [
                    lambda b=b, o=o: attention.forward(p.q, None, None, p.kv, b, AttnSpec(0.09), o)
                    for b, o in zip(p.batches, outs)
                ]
                us = replay_ms(calls, target_ms=8.0, budget_ms=160.0) * 1e3
                record(item="prefill", shape=name, case=label, form=form, us=us, floor_us=flops / FLOPS_PER_US,
                       tflops=flops / us / 1e6, of_flashinfer=flops / us / 1e6 / FLASHINFER_TFLOPS[name])  # fmt: skip


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def small() -> None:
    """Norm, rope + KV write, activation, plan."""
    timing.warm_up()
    for tokens in (1, 256, 8192):
        x, residual, weight, out = bf16(tokens, 4096), bf16(tokens, 4096), bf16(4096), bf16(tokens, 4096)
        us = replay_ms([lambda: rms_norm(x, weight, 1e-5, out, residual, True)]) * 1e3
        record(item="add_rms_norm", tokens=tokens, us=us, floor_us=x.numel() * 8 / BYTES_PER_US)
        qkv, table = bf16(tokens, 48 * 128), torch.randn(8192, 128, device="cuda")
        positions = torch.randint(0, 8192, (tokens,), device="cuda")
        layer = KvLayer(bf16(tokens // 64 + 2, 8, 64, 128), bf16(tokens // 64 + 2, 8, 64, 128), 64)
        slots = torch.arange(64, tokens + 64, device="cuda")
        norm = (bf16(128), bf16(128), 1e-6)
        call = lambda: qk_norm_rope_write(qkv, (32, 8, 128), table, positions, norm, (layer, slots), True)  # noqa: E731
        us = replay_ms([call]) * 1e3
        record(item="qk_norm_rope_write", tokens=tokens, us=us, floor_us=tokens * 128 * 2 * 104 / BYTES_PER_US)
        gate_up, act = bf16(tokens, 28672), bf16(tokens, 14336)
        us = replay_ms([lambda: gated(gate_up, "silu", act, True)]) * 1e3
        record(item="silu_mul", tokens=tokens, us=us, floor_us=act.numel() * 6 / BYTES_PER_US)
    for rows in (1, 256, 1024):
        p, attention = paged([(1, 300)] * rows, Heads(), rows), attention_for(Heads())
        record(item="prepare decode", rows=rows, us=replay_ms([lambda: attention.prepare(p.batches[0])]) * 1e3)
    p, attention = paged([(1, 300)] * 200 + [(500, 500)] * 4, Heads(), 200), attention_for(Heads())
    record(item="prepare mixed", rows=204, us=replay_ms([lambda: attention.prepare(p.batches[0])]) * 1e3)


def linear() -> None:
    """GEMV against F.linear."""
    timing.warm_up()
    for n, k in ((6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096), (4096, 1024), (1024, 2048), (1024, 3072),
                 (151936, 1024)):  # fmt: skip
        weights = [bf16(n, k) for _ in range(max(2, min(100, int(320e6 // (2 * n * k)))))]
        x, out, norm = bf16(1, k), bf16(1, n), bf16(k)
        floor = 2 * n * k / BYTES_PER_US
        own = replay_ms([lambda w=w: gemv(x, w, out, Fused(norm=(norm, 1e-6)), True) for w in weights]) * 1e3
        library = replay_ms([lambda w=w: F.linear(x, w) for w in weights]) * 1e3
        error = relative_error(gemv(x, weights[0], out), x.float() @ weights[0].float().T)
        record(item="gemv+norm", n=n, k=k, us=own, cublas_us=library, floor_us=floor, relative=error)
    for n, k in ((14336, 4096), (3072, 1024)):
        weights = [bf16(2 * n, k) for _ in range(max(2, min(100, int(320e6 // (4 * n * k)))))]
        x, out, norm = bf16(1, k), bf16(1, n), bf16(k)
        fused = Fused(norm=(norm, 1e-6), activation="silu")
        own = replay_ms([lambda w=w: gemv(x, w, out, fused, True) for w in weights]) * 1e3
        record(item="gemv+norm+silu", n=n, k=k, us=own, floor_us=4 * n * k / BYTES_PER_US)
    for n, k in ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)):
        weights = [bf16(n, k) for _ in range(int(320e6 // (2 * n * k)))]
        for tokens in (2, 16):
            x, out = bf16(tokens, k), torch.full((tokens, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            error = relative_error(tile_products(x, weights[0], out), x.float() @ weights[0].float().T)
            own = replay_ms([lambda w=w: tile_products(x, w, out, pdl=True) for w in weights]) * 1e3
            library = replay_ms([lambda w=w: F.linear(x, w) for w in weights]) * 1e3
            shape, floor = {"tokens": tokens, "n": n, "k": k}, 2 * n * k / BYTES_PER_US
            record(item="tiles", **shape, us=own, cublas_us=library, floor_us=floor, relative=error)


def sampling() -> None:
    """Rows of 151,936 logits: greedy, plain, with top-k and top-p; the plain draw against its distribution."""
    timing.warm_up()
    for rows in (1, 64, 256):
        sampler, out = Sampler(rows, torch.device("cuda")), torch.zeros(rows, dtype=torch.int64, device="cuda")
        ones, ids = torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda")
        u = uniforms(ids * 12345, ids, torch.zeros(rows, dtype=torch.float64, device="cuda"))
        cut = Cut((ones * 50).int(), ones * 0.9, ones * 0.0)
        for spread in (1.0, 4.0):
            many = [bf16(rows, 151936) * spread for _ in range(2)]
            for name, t, c in (("greedy", ones * 0, None), ("plain", ones, None), ("top-k 50, top-p 0.9", ones, cut)):
                us = replay_ms([lambda x=x, t=t, c=c: sampler(x, u, t, c, out) for x in many]) * 1e3
                floor = rows * 151936 * 2 / BYTES_PER_US
                record(item="sample", rows=rows, case=name, spread=spread, us=us, floor_us=floor)
            if timing.COMPILE_ONLY:
                continue
            chosen = sampler(many[0], u, ones, cut, out).tolist()
            expected = [
                reference.sample_row(x.double().cpu(), v, temperature=1.0, top_k=50, top_p=float(torch.tensor(0.9)),
                                     min_p=0.0)
                for x, v in zip(many[0][:64], u.tolist())
            ]  # fmt: skip
            equal = sum(a == b for a, b in zip(chosen, expected))
            record(item="check", case="sampler against a full sort", equal=equal, rows=len(expected), spread=spread)


def experts() -> None:
    """Qwen3-30B-A3B and Mixtral layers; the floor reads each expert that is used once."""
    timing.warm_up()
    for num_experts, top_k, hidden, ffn in ((128, 8, 2048, 768), (8, 2, 4096, 14336)):
        weights = ExpertWeights(bf16(num_experts, 2 * ffn, hidden) / 45, bf16(num_experts, hidden, ffn) / 45)
        layer = ExpertLayer(weights, 8192, top_k)
        for tokens in (1, 32, 512, 8192):
            x, out = bf16(tokens, hidden), bf16(tokens, hidden)
            scores, ids = torch.rand(tokens, num_experts, device="cuda").topk(top_k)
            ids = ids.int()
            us = replay_ms([lambda: layer(x, ids, scores, weights, out)]) * 1e3
            used = ids.unique().numel()
            floor = max(used * 6 * ffn * hidden / BYTES_PER_US, tokens * top_k * 6 * ffn * hidden / FLOPS_PER_US)
            record(item="experts", experts=num_experts, top_k=top_k, tokens=tokens, us=us, floor_us=floor)
        if timing.COMPILE_ONLY:
            continue
        first = layer(x, ids, scores, weights, torch.full_like(x, float("nan")))
        same = sum(torch.equal(layer(x, ids, scores, weights, torch.empty_like(x)), first) for _ in range(20))
        expected = torch.zeros(64, hidden, device="cuda")
        for t in range(64):
            for e, score in zip(ids[t].tolist(), scores[t].tolist()):
                h = reference.gated((x[t : t + 1].float() @ weights.gate_up[e].float().T), "silu")
                expected[t] += score * (h @ weights.down[e].float().T)[0]
        error = relative_error(first[:64], expected)
        record(item="check", case=f"{num_experts} experts", relative=error, same_of_20=same)


GROUPS: dict[str, Callable[[], None]] = {
    "checks_a": checks_a, "checks_b": checks_b, "checks_c": checks_c, "decode": decode, "prefill": prefill,
    "small": small, "linear": linear, "sampling": sampling, "experts": experts,
}  # fmt: skip


def is_wrong(row: dict[str, object]) -> bool:
    """A check that failed, or a group that did."""
    if row["item"] != "check":
        return "failed" in row
    relative, equal = row.get("relative", 0.0), row.get("equal", True)
    return not relative < 4e-3 or not equal or equal not in (True, row.get("rows")) or row.get("same_of_20", 20) != 20


def main(out: Path, groups: list[str]) -> int:
    """Compile all groups in parallel, then run each in its own process and gather their rows. 1 if a check failed."""
    me = [sys.executable, __file__, "--group"]
    began = time.time()
    quiet = {**os.environ, "KERNELS_COMPILE_ONLY": "1", "OMP_NUM_THREADS": "1"}
    compiling = [subprocess.Popen([*me, g, str(out)], env=quiet, stdout=subprocess.DEVNULL) for g in groups]
    for process in compiling:
        process.wait()
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    rows = []
    for group in groups:
        print(f"== {group} at {time.time() - began:.0f} s", flush=True)
        subprocess.run([*me, group, str(out)], check=False, timeout=200)
        part = out / f"{group}.json"
        rows += json.loads(part.read_text()) if part.exists() else [{"item": group, "failed": True}]
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), "environment": environment(), "rows": rows}, indent=1)
    (out / "kernels_h200.json").write_text(text)
    wrong = [row for row in rows if is_wrong(row)]
    print(f"{len(rows)} rows, wrong: {wrong}")
    return int(bool(wrong))


def run_group(name: str, out: Path) -> None:
    """One group, in this process."""
    torch.manual_seed(0)
    try:
        GROUPS[name]()
    finally:
        if not timing.COMPILE_ONLY:
            (out / f"{name}.json").write_text(json.dumps(results))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the rows")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    found = parser.parse_args()
    if unknown := [g for g in found.groups if g not in GROUPS]:  # choices would refuse no groups at all
        parser.error(f"there is no group {unknown[0]}: {', '.join(GROUPS)}")
    return found


if __name__ == "__main__":
    args = arguments()
    if args.group is not None:
        run_group(args.group, args.out)
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        sys.exit(main(args.out, args.groups or list(GROUPS)))
