"""Random paged batches for attention tests, with everything poisoned that a kernel must not rely on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.attention import Batch, KvLayer
from steelyard.kernels.kv_fp8 import FP8, hadamard, to_stored

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Problem:
    """Inputs of one Attention.forward; the pool already holds the context before the new tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv: KvLayer
    batch: Batch


@dataclass(frozen=True)
class Layout:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    block_major: bool = False


def pool(layout: Layout, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Random K and V pools; block-major ones are views of a larger tensor, as when a block holds all layers."""
    shape = (num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
    if layout.block_major:
        whole = torch.randn(num_blocks, 3, 2, *shape[1:]).to(layout.dtype).to(DEVICE)
        return whole[:, 1, 0], whole[:, 1, 1]
    return torch.randn(shape).to(layout.dtype).to(DEVICE), torch.randn(shape).to(layout.dtype).to(DEVICE)


def problem(rows: list[tuple[int, int]], layout: Layout, *, num_decode: int, extra_rows: int = 0) -> Problem:
    """rows: (new tokens, context with them). extra_rows: padding rows without tokens at the end."""
    block = layout.block_size
    blocks = [-(-ctx // block) for _, ctx in rows]
    num_blocks = sum(blocks) + 3
    order = torch.randperm(num_blocks - 1) + 1
    width = max(blocks) + 2
    table = torch.zeros(len(rows) + extra_rows, width, dtype=torch.int32)
    slots, positions, at = [], [], 0
    for r, (new, ctx) in enumerate(rows):
        table[r, : blocks[r]] = order[at : at + blocks[r]].int()
        at += blocks[r]
        where = torch.arange(ctx - new, ctx)
        positions.append(where)
        slots.append(table[r, where // block].long() * block + where % block)
    new_lens = [new for new, _ in rows] + [0] * extra_rows
    q_start = torch.tensor([0, *torch.tensor(new_lens).cumsum(0).tolist()], dtype=torch.int32)
    num_tokens = int(q_start[-1])
    k_pool, v_pool = pool(layout, num_blocks)
    kv_shape = (num_tokens, layout.num_kv_heads, layout.head_dim)
    batch = Batch(
        positions=torch.cat(positions).to(DEVICE),
        slots=(torch.cat(slots).to(DEVICE),),
        q_start=q_start.to(DEVICE),
        ctx_len=torch.tensor([ctx for _, ctx in rows] + [0] * extra_rows, dtype=torch.int32).to(DEVICE),
        tables=(table.to(DEVICE),),
        num_tokens=num_tokens,
        num_decode=num_decode,
        max_q=max(new_lens),
        max_ctx=max(ctx for _, ctx in rows),
    )
    return Problem(
        q=torch.randn(num_tokens, layout.num_heads, layout.head_dim).to(layout.dtype).to(DEVICE),
        k=torch.randn(kv_shape).to(layout.dtype).to(DEVICE),
        v=torch.randn(kv_shape).to(layout.dtype).to(DEVICE),
        kv=KvLayer(k_pool, v_pool, block),
        batch=batch,
    )


def quantised(kv: KvLayer, k_scale: list[float], v_scale: list[float]) -> KvLayer:
    """The same pool in fp8 with these scales of its KV heads, in as long a block stride."""
    stored = []
    for pool, new, values in ((kv.k, hadamard(kv.k), k_scale), (kv.v, kv.v, v_scale)):
        scale = torch.tensor(values, device=DEVICE)
        held = torch.empty_strided(pool.shape, pool.stride(), dtype=torch.uint8, device=DEVICE).view(FP8)
        held.view(torch.uint8).copy_(to_stored(new.movedim(1, -2), scale, FP8).view(torch.uint8).movedim(-2, 1))
        stored.append((held, scale))
    return KvLayer(stored[0][0], stored[1][0], kv.block_size, stored[0][1], stored[1][1])


def max_error(out: Tensor, reference: Tensor) -> float:
    """Largest difference over the reference's root mean square; NaN gives NaN, which passes no limit."""
    out, reference = out.double().cpu(), reference.double().cpu()
    return float((out - reference).abs().max() / reference.square().mean().sqrt())
