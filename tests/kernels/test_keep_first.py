"""First positions kept behind a window: every backend against the mask written out over float64 scores."""

from __future__ import annotations

import pytest
import torch

from steelyard.kernels.attention import Attention, AttnSpec
from steelyard.kernels.cpu_attention import CpuAttention
from steelyard.kernels.gathered import GatheredAttention
from steelyard.kernels.kv_fp8 import hadamard
from steelyard.kernels.reference import ReferenceAttention
from steelyard.kernels.triton_attention import TritonAttention
from steelyard.kernels.triton_configs import AttentionShape
from tests.kernels.paged import DEVICE, Layout, Problem, max_error, problem, quantised

ROWS = [(1, 1), (1, 900), (1, 70), (1, 9), (5, 16), (40, 41), (90, 300), (3, 200)]


def of(name: str, layout: Layout, window: int, keep_first: int, is_fp8: bool) -> Attention:
    if name == "triton":
        shape = AttentionShape(
            layout.num_heads, layout.num_kv_heads, layout.head_dim, layout.block_size, max_rows=16, max_tokens=512,
            windows=(window,), dtype=layout.dtype, is_fp8=is_fp8, keep_first=keep_first, target_programs=16,
        )  # fmt: skip
        return TritonAttention(shape, DEVICE)
    if name == "cpu":
        return CpuAttention()
    return ReferenceAttention() if name == "reference" else GatheredAttention(name)


def masked(p: Problem, spec: AttnSpec) -> torch.Tensor:
    """A twin that knows no blocks behind a window: all keys, and a mask by position."""
    out, first = [], 0
    for row in range(len(ROWS)):
        ctx = int(p.batch.ctx_len[row])
        num_new = int(p.batch.q_start[row + 1]) - first
        at = torch.arange(ctx, device=DEVICE)
        block, offset = p.batch.tables[0][row, at // p.kv.block_size].long(), at % p.kv.block_size
        k, v = (pool[block, :, offset].double() for pool in (p.kv.k, p.kv.v))
        if p.kv.k_scale is not None and p.kv.v_scale is not None:
            k, v = hadamard(k * p.kv.k_scale.double()[:, None]), v * p.kv.v_scale.double()[:, None]
        q = p.q[first : first + num_new].double()
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        position = torch.arange(ctx - num_new, ctx, device=DEVICE)[:, None]
        assert spec.window is not None
        seen = (at <= position) & ((position - at < spec.window) | (at < spec.keep_first))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
        first += num_new
    return torch.cat(out)


@pytest.mark.parametrize("name", ["reference", "naive", "sdpa", "cpu", "triton"])
@pytest.mark.parametrize(("window", "keep_first"), [(70, 4), (64, 33), (1, 1), (20, 130)], ids=str)
def test_a_query_sees_its_window_and_the_first_positions(name: str, window: int, keep_first: int) -> None:
    torch.manual_seed(window)
    layout = Layout(num_heads=3, num_kv_heads=1, block_size=32)
    p, spec = problem(ROWS, layout, num_decode=4), AttnSpec(0.125, window=window, keep_first=keep_first)
    check(name, p, layout, spec)


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_the_same_over_an_fp8_pool_in_blocks_larger_than_a_tile(name: str) -> None:
    torch.manual_seed(0)
    layout = Layout(num_heads=4, num_kv_heads=2, block_size=64)
    p, spec = problem(ROWS, layout, num_decode=4), AttnSpec(0.125, window=50, keep_first=40)
    p.kv = quantised(p.kv, [0.25, 0.03], [0.0625, 0.1])
    check(name, p, layout, spec)


def check(name: str, p: Problem, layout: Layout, spec: AttnSpec) -> None:
    """Blocks that no query sees are NaN in K, and the null block in the table, as when they were given back."""
    attention = of(name, layout, spec.window or 0, spec.keep_first, p.kv.k_scale is not None)
    attention.prepare(p.batch)
    out = torch.full_like(p.q, torch.nan)
    attention.forward(p.q, p.k, p.v, p.kv, p.batch, spec, out)
    expected = masked(p, spec)
    assert max_error(out, expected) < 2e-5
    given_back, size = 0, layout.block_size
    for row, (new, ctx) in enumerate(ROWS):
        first = max(0, ctx - new - (spec.window or 0) + 1) // size
        for index in range(-(-spec.keep_first // size), first):
            p.batch.tables[0][row, index] = 0
            given_back += 1
    again = torch.full_like(p.q, torch.nan)
    attention.prepare(p.batch)
    attention.forward(p.q, None, p.v, p.kv, p.batch, spec, again)
    assert given_back > 0 and max_error(again, expected) < 2e-5
