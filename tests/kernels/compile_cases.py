"""Every launch that serving makes, by room: small calls on meta tensors whose kernels `compiling` then compiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from steelyard.kernels.attention import AttnSpec, Batch, KvLayer
from steelyard.kernels.kv_fp8 import FP8
from steelyard.kernels.triton_act import embed, gated
from steelyard.kernels.triton_attention import TritonAttention
from steelyard.kernels.triton_configs import AttentionShape
from steelyard.kernels.triton_linear import Fused, gemv
from steelyard.kernels.triton_moe import ExpertLayer, ExpertWeights
from steelyard.kernels.triton_norm import rms_norm
from steelyard.kernels.triton_rope_kv import qk_norm_rope_write
from steelyard.kernels.triton_sample import Cut, Sampler, uniforms
from steelyard.kernels.triton_tiles_linear import tile_products
from tests.kernels.compiling import META

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def attention_batch(rows: int, tokens: int, num_decode: int) -> Batch:
    return Batch(
        positions=empty(tokens, dtype=torch.int64),
        slots=(empty(tokens, dtype=torch.int64),),
        q_start=empty(rows + 1, dtype=torch.int32),
        ctx_len=empty(rows, dtype=torch.int32),
        tables=(empty(rows, 64, dtype=torch.int32),),
        num_tokens=tokens,
        num_decode=num_decode,
    )


def attend(shape: AttentionShape, spec: AttnSpec, rows: tuple[int, ...] = (1, 64), gluon: bool = False) -> None:
    """Decode and prefill at each number of decode rows, which decides on the decode kernel's form."""
    attention = TritonAttention(shape, META, pdl=True)
    attention._gluon = gluon
    held = FP8 if shape.is_fp8 else shape.dtype
    pool = empty(128, 4, 2, shape.num_kv_heads, shape.block_size, shape.head_dim, dtype=held)
    scale = empty(shape.num_kv_heads, dtype=torch.float32) if shape.is_fp8 else None
    kv = KvLayer(pool[:, 1, 0], pool[:, 1, 1], shape.block_size, scale, scale)
    for num_rows in rows:
        tokens = num_rows + 64
        q = empty(tokens, shape.num_heads, shape.head_dim, dtype=shape.dtype)
        k = empty(tokens, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
        batch = attention_batch(num_rows + 1, tokens, num_rows)
        attention.prepare(batch)
        attention.forward(q, k, k, kv, batch, spec, torch.empty_like(q))


def shape_of(heads: int, kv_heads: int, dim: int, block: int = 64, **options: object) -> AttentionShape:
    return replace(AttentionShape(heads, kv_heads, dim, block, max_rows=256, max_tokens=8192), **options)


def attention_common() -> None:
    """Llama and Qwen groups at head size 128: every decode form, Triton prefill with and without TMA."""
    for block in (16, 64, 128):
        attend(shape_of(32, 8, 128, block), AttnSpec(scale=0.09))


def attention_sizes() -> None:
    """The other head sizes and odd groups."""
    for heads, kv_heads, dim in ((9, 3, 64), (32, 32, 80), (32, 32, 96), (14, 2, 64), (8, 4, 256)):
        for block in (16, 64):
            attend(shape_of(heads, kv_heads, dim, block), AttnSpec(scale=0.09), rows=(1,))


def attention_options() -> None:
    """Window, cap and sinks, lse; float32."""
    sinks = empty(32)
    for window in (None, 1024):
        shape = shape_of(32, 8, 128, windows=(window,))
        attend(shape, AttnSpec(0.09, window=window, softcap=30.0, sinks=sinks, want_lse=True), rows=(1,))
    attend(shape_of(8, 4, 256, windows=(1024,)), AttnSpec(0.09, window=1024, softcap=50.0), rows=(1,))
    attend(shape_of(64, 8, 64, windows=(128,)), AttnSpec(0.09, window=128, sinks=empty(64)), rows=(1,))
    attend(shape_of(9, 3, 64, 16, dtype=torch.float32), AttnSpec(0.09), rows=(1,))


def attention_fp8() -> None:
    """An fp8 pool: the common shapes, other head sizes, and every option; and the kernel that writes it."""
    for block in (16, 64, 128):
        attend(shape_of(32, 8, 128, block, is_fp8=True), AttnSpec(scale=0.09))
    for heads, kv_heads, dim in ((9, 3, 64), (32, 32, 80), (8, 4, 256)):
        for block in (16, 64):
            attend(shape_of(heads, kv_heads, dim, block, is_fp8=True), AttnSpec(scale=0.09), rows=(1,))
    for window in (None, 1024):
        shape = shape_of(32, 8, 128, windows=(window,), is_fp8=True)
        attend(shape, AttnSpec(0.09, window=window, softcap=30.0, sinks=empty(32), want_lse=True), rows=(1,))
    shape = shape_of(8, 4, 256, windows=(1024,), is_fp8=True)
    attend(shape, AttnSpec(0.09, window=1024, softcap=50.0), rows=(1,))
    pool, scale = empty(16, 8, 64, 128, dtype=FP8), empty(8, dtype=torch.float32)
    layer_kv = (KvLayer(pool, pool, 64, scale, scale), empty(1, dtype=torch.int64))
    for tokens in (1, 256):
        rotary = empty(tokens, 128, dtype=torch.float32)
        qk_norm_rope_write(empty(tokens, 48 * 128), (32, 8, 128), rotary, None, None, layer_kv, True)


def attention_fp8_more() -> None:
    """An fp8 pool: groups of 2 and 7, the other sizes with crowded machines, float16 and float32."""
    for heads, kv_heads, dim in ((16, 8, 128), (14, 2, 64), (32, 32, 96)):
        for block in (16, 64):
            attend(shape_of(heads, kv_heads, dim, block, is_fp8=True), AttnSpec(scale=0.09), rows=(1,))
    for heads, kv_heads, dim, rows in ((9, 3, 64, 160), (32, 32, 80, 16), (32, 32, 96, 16)):
        attend(shape_of(heads, kv_heads, dim, 64, is_fp8=True), AttnSpec(scale=0.09), rows=(rows,))
    attend(shape_of(32, 8, 128, dtype=torch.float16, is_fp8=True), AttnSpec(0.09), rows=(1,))
    for block in (16, 64):
        attend(shape_of(6, 2, 64, block, dtype=torch.float32, is_fp8=True), AttnSpec(0.09), rows=(1,))
    shape = shape_of(6, 2, 64, 16, windows=(24,), dtype=torch.float32, is_fp8=True)
    attend(shape, AttnSpec(0.09, window=24), rows=(1,))
    for heads, dtype in (
        ((16, 8, 128), BF16), ((9, 3, 64), torch.float32), ((8, 8, 80), BF16), ((8, 8, 96), BF16), ((8, 4, 256), BF16)
    ):  # fmt: skip
        pool, scale = empty(16, heads[1], 64, heads[2], dtype=FP8), empty(heads[1], dtype=torch.float32)
        layer_kv, norm = KvLayer(pool, pool, 64, scale, scale), empty(heads[2], dtype=torch.float32)
        for rotated in (heads[2], heads[2] // 2):
            qkv = empty(64, (heads[0] + 2 * heads[1]) * heads[2], dtype=dtype)
            slots, rotary = empty(64, dtype=torch.int64), empty(64, rotated, dtype=torch.float32)
            qk_norm_rope_write(qkv, heads, rotary, None, (norm, norm, 1e-6), (layer_kv, slots), False)


def attention_bounded() -> None:
    """First positions kept behind a window, over either pool; all head sizes, and float32."""
    for is_fp8 in (False, True):
        for block in (16, 64):
            shape = shape_of(32, 8, 128, block, windows=(1024,), keep_first=4, is_fp8=is_fp8)
            attend(shape, AttnSpec(0.09, window=1024, keep_first=4))
        for heads, kv_heads, dim in ((16, 8, 128), (9, 3, 64), (32, 32, 80), (32, 32, 96), (8, 4, 256)):
            shape = shape_of(heads, kv_heads, dim, windows=(1024,), keep_first=4, is_fp8=is_fp8)
            attend(shape, AttnSpec(0.09, window=1024, keep_first=4), rows=(1,))
        shape = shape_of(6, 2, 64, 16, windows=(24,), keep_first=5, dtype=torch.float32, is_fp8=is_fp8)
        attend(shape, AttnSpec(0.09, window=24, keep_first=5), rows=(1,))


def gluon() -> None:
    """The Hopper prefill: blocks, groups, options."""
    for block in (16, 64, 128):
        attend(shape_of(32, 8, 128, block), AttnSpec(0.09), rows=(1,), gluon=True)
    attend(shape_of(16, 8, 128), AttnSpec(0.09), rows=(1,), gluon=True)
    attend(shape_of(8, 8, 128), AttnSpec(0.09), rows=(1,), gluon=True)
    shape = shape_of(32, 8, 128, windows=(1024,))
    options = AttnSpec(0.09, window=1024, softcap=30.0, sinks=empty(32), want_lse=True)
    attend(shape, options, rows=(1,), gluon=True)
    attend(shape, AttnSpec(0.09, window=1024), rows=(1,), gluon=True)


def layer() -> None:
    """Norms, rotary + KV write, activations, embedding, GEMV and lm_head of the two benchmark models and SmolLM2."""
    for hidden, ffn, heads in ((4096, 14336, (32, 8, 128)), (1024, 3072, (16, 8, 128)), (576, 1536, (9, 3, 64))):
        qkv = (heads[0] + 2 * heads[1]) * heads[2]
        pool = empty(16, heads[1], 64, heads[2])
        cos_sin = empty(4096, heads[2], dtype=torch.float32)
        for tokens in (1, 256):
            x, slots = empty(tokens, hidden), empty(tokens, dtype=torch.int64)
            for pdl in (False, True):
                rms_norm(x, empty(hidden), 1e-5, empty(tokens, hidden), x, pdl)
                rms_norm(x, empty(hidden), 1e-5, empty(tokens, hidden), None, pdl)
                for norm in (None, (empty(heads[2]), empty(heads[2]), 1e-6)):
                    layer_kv = (KvLayer(pool, pool, 64), slots)
                    qk_norm_rope_write(empty(tokens, qkv), heads, cos_sin, slots, norm, layer_kv, pdl)
                gated(empty(tokens, 2 * ffn), "silu", empty(tokens, ffn), pdl)
            embed(slots, empty(1000, hidden), x)
        row = empty(1, hidden)
        for pdl in (False, True):
            norm_first = Fused(norm=(empty(hidden), 1e-5))
            gemv(row, empty(qkv, hidden), empty(1, qkv), norm_first, pdl)
            gemv(row, empty(2 * ffn, hidden), empty(1, ffn), Fused(norm=norm_first.norm, activation="silu"), pdl)
            gemv(empty(1, ffn), empty(hidden, ffn), row, Fused(residual=True), pdl)
            gemv(empty(1, heads[0] * heads[2]), empty(hidden, heads[0] * heads[2]), row, Fused(residual=True), pdl)
            gemv(row, empty(151936, hidden), empty(1, 151936), norm_first, pdl)


def tiles() -> None:
    """Every product of a layer for a few tokens, of the benchmark models' smaller one and SmolLM2, and of K at most."""
    for hidden, ffn, (num_heads, num_kv_heads, dim) in (
        (1024, 3072, (16, 8, 128)), (576, 1536, (9, 3, 64)), (2048, 4096, (32, 8, 64)),
        (4096, 4096, (32, 8, 128)),
    ):  # fmt: skip
        norm = (empty(hidden), 1e-5)
        for n, k, fused in (
            ((num_heads + 2 * num_kv_heads) * dim, hidden, Fused(norm=norm)),
            (hidden, num_heads * dim, Fused(residual=True)),
            (ffn, hidden, Fused(norm=norm, activation="silu")),
            (hidden, ffn, Fused(residual=True)),
        ):
            weight = empty(n * (2 if fused.activation else 1), k)
            for pdl in (False, True):
                tile_products(empty(3, k), weight, empty(3, n), fused, pdl)


def sampling() -> None:
    """The four passes, with and without cuts, over bf16 and float32 logits."""
    ids, counts = empty(8, dtype=torch.int64), empty(8, dtype=torch.int32)
    ones, u = empty(8, dtype=torch.float32), empty(8, dtype=torch.float64)
    uniforms(ids, ids, u)
    for dtype in (BF16, torch.float32):
        for cut in (None, Cut(counts, ones, ones)):
            Sampler(8, META)(empty(8, 151936, dtype=dtype), u, ones, cut, ids)


def moe() -> None:
    """Qwen3-30B-A3B and Mixtral shapes, few and many tokens."""
    for num_experts, top_k, hidden, ffn in ((128, 8, 2048, 768), (8, 2, 4096, 14336)):
        experts = ExpertWeights(empty(num_experts, 2 * ffn, hidden), empty(num_experts, hidden, ffn))
        layer = ExpertLayer(experts, 8192, top_k)
        for tokens in (1, 512, 8192):
            x, ids = empty(tokens, hidden), empty(tokens, top_k, dtype=torch.int32)
            layer(x, ids, empty(tokens, top_k, dtype=torch.float32), experts, torch.empty_like(x))


CASES: dict[str, Callable[[], None]] = {
    "attention_common": attention_common,
    "attention_sizes": attention_sizes,
    "attention_options": attention_options,
    "attention_fp8": attention_fp8,
    "attention_fp8_more": attention_fp8_more,
    "attention_bounded": attention_bounded,
    "gluon": gluon,
    "layer": layer,
    "tiles": tiles,
    "sampling": sampling,
    "moe": moe,
}
