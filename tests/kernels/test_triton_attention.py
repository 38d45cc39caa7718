"""The Triton attention backend against the reference in float64: decode, prefill, mixed steps and their options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from steelyard.errors import StartError
from steelyard.kernels.attention import AttnSpec, KvLayer
from steelyard.kernels.reference import ReferenceAttention
from steelyard.kernels.triton_attention import TritonAttention
from steelyard.kernels.triton_configs import AttentionShape
from tests.kernels.paged import DEVICE, Layout, Problem, max_error, problem


def backend(layout: Layout, windows: tuple[int | None, ...] = (None,), **options: int) -> TritonAttention:
    shape = AttentionShape(
        layout.num_heads, layout.num_kv_heads, layout.head_dim, layout.block_size, max_rows=16, max_tokens=512,
        windows=windows, dtype=layout.dtype, **options,
    )  # fmt: skip
    return TritonAttention(shape, DEVICE)


def expected(p: Problem, spec: AttnSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference on float64 copies, on the CPU."""
    kv = KvLayer(p.kv.k.cpu().double(), p.kv.v.cpu().double(), p.kv.block_size)
    batch = replace(
        p.batch, positions=p.batch.positions.cpu(), slots=tuple(s.cpu() for s in p.batch.slots),
        q_start=p.batch.q_start.cpu(), ctx_len=p.batch.ctx_len.cpu(), tables=tuple(t.cpu() for t in p.batch.tables),
    )  # fmt: skip
    sinks = None if spec.sinks is None else spec.sinks.cpu()
    out = torch.full(p.q.shape, float("nan"), dtype=torch.float64)
    lse = ReferenceAttention().forward(
        p.q.cpu().double(), p.k.cpu().double(), p.v.cpu().double(), kv, batch,
        replace(spec, sinks=sinks, want_lse=True), out,
    )  # fmt: skip
    assert lse is not None
    return out, lse


def run(attention: TritonAttention, p: Problem, spec: AttnSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    attention.prepare(p.batch)
    out = torch.full_like(p.q, float("nan"))
    lse = attention.forward(p.q, p.k, p.v, p.kv, p.batch, spec, out)
    return out, lse


def check(p: Problem, layout: Layout, spec: AttnSpec, **options: int) -> None:
    """Output and lse equal the reference's; the pool gets the new K and V."""
    reference, reference_lse = expected(p, spec)
    limit = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}[layout.dtype]
    out, lse = run(backend(layout, (spec.window,), **options), p, replace(spec, want_lse=True))
    assert lse is not None
    assert max_error(out, reference) < limit and max_error(lse, reference_lse) < limit
    slot = p.batch.slots[0].cpu()
    block, offset = slot // layout.block_size, slot % layout.block_size
    assert torch.equal(p.kv.k.cpu()[block, :, offset], p.k.cpu())
    assert torch.equal(p.kv.v.cpu()[block, :, offset], p.v.cpu())


DECODE = [(1, 1), (1, 150), (1, 64), (1, 65)]
PREFILL = [(5, 16), (1, 41), (17, 90)]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(num_heads=4),
        Layout(num_heads=3, num_kv_heads=1),
        Layout(num_heads=5, num_kv_heads=1, head_dim=80, block_size=32),
        Layout(num_heads=2, num_kv_heads=2, head_dim=96, block_size=128, dtype=torch.float16),
        Layout(num_heads=4, num_kv_heads=1, head_dim=128, block_size=64, dtype=torch.float16, block_major=True),
        Layout(num_heads=2, num_kv_heads=1, head_dim=256, block_size=16, dtype=torch.float16, block_major=True),
    ],
    ids=lambda x: f"{x.num_heads}on{x.num_kv_heads}-d{x.head_dim}-b{x.block_size}-{str(x.dtype)[6:]}",
)
def test_mixed_step_equals_reference(layout: Layout) -> None:
    torch.manual_seed(layout.head_dim)
    p = problem(DECODE + PREFILL, layout, num_decode=len(DECODE), extra_rows=2)
    check(p, layout, AttnSpec(scale=layout.head_dim**-0.5))


def test_results_repeat_bit_for_bit_with_and_without_lse() -> None:
    torch.manual_seed(2)
    layout = Layout(num_heads=2, num_kv_heads=1)
    p = problem([(1, 200), (1, 30), (20, 60)], layout, num_decode=2)
    attention, spec = backend(layout), AttnSpec(scale=0.125)
    out, none = run(attention, p, spec)
    again, lse = run(attention, p, replace(spec, want_lse=True))
    assert none is None and lse is not None and torch.equal(out, again)


@pytest.mark.parametrize("window", [1, 70])
def test_window_hides_older_keys_in_decode_and_prefill(window: int) -> None:
    torch.manual_seed(window)
    layout = Layout(num_heads=2, num_kv_heads=1, block_size=32)
    p = problem([(1, 200), (1, 7), (70, 150)], layout, num_decode=2)
    check(p, layout, AttnSpec(scale=0.125, window=window))


def test_softcap_and_sinks_join_the_softmax() -> None:
    torch.manual_seed(3)
    layout = Layout(num_heads=6, num_kv_heads=2, block_size=32)
    p = problem([(1, 200), (1, 7), (50, 90)], layout, num_decode=2)
    sinks = torch.randn(6, device=DEVICE) * 2
    check(p, layout, AttnSpec(scale=0.5, softcap=2.0, sinks=sinks))
    assert (
        max_error(expected(p, AttnSpec(scale=0.5, softcap=2.0, sinks=sinks))[0], expected(p, AttnSpec(0.5))[0]) > 0.05
    )


def test_every_token_sees_the_whole_row_without_the_causal_mask() -> None:
    torch.manual_seed(4)
    layout = Layout(num_heads=2, num_kv_heads=1)
    p = problem([(40, 40), (3, 70)], layout, num_decode=0)
    check(p, layout, AttnSpec(scale=0.125, causal=False))


@pytest.mark.parametrize("target_programs", [4, 64])
def test_split_rows_are_merged_by_either_kernel(target_programs: int) -> None:
    """Few programs wanted: the last one merges; many wanted: a second kernel does. Both after really splitting."""
    torch.manual_seed(5)
    layout = Layout(num_heads=3, num_kv_heads=1)
    p = problem([(1, 900), (1, 3), (1, 20), (1, 64)], layout, num_decode=4)
    attention = backend(layout, target_programs=target_programs)
    attention.prepare(p.batch)
    parts = attention._rows.view(-1, 4)[:4, 1].tolist()
    assert parts[0] > 1 and parts[1] == 1
    check(p, layout, AttnSpec(scale=0.125), target_programs=target_programs)


def test_prefill_only_step_takes_rows_of_one_token_too() -> None:
    torch.manual_seed(6)
    layout = Layout(num_heads=2, num_kv_heads=1)
    p = problem([(1, 90), (33, 33)], layout, num_decode=0)
    check(p, layout, AttnSpec(scale=0.125))


def test_rows_after_the_decodes_may_have_one_token() -> None:
    torch.manual_seed(7)
    layout = Layout(num_heads=2, num_kv_heads=1)
    p = problem([(1, 90), (33, 33), (1, 50)], layout, num_decode=1)
    check(p, layout, AttnSpec(scale=0.125))


def test_padding_rows_write_nothing_and_leave_no_nan() -> None:
    """A decode bucket's padding: one token a row, no context, slot -1."""
    torch.manual_seed(8)
    layout = Layout(num_heads=2, num_kv_heads=1)
    p = problem([(1, 20), (1, 5), (1, 9)], layout, num_decode=3)
    p.batch.ctx_len[2] = 0
    p.batch.slots[0][2] = -1
    before = p.kv.k.clone()
    out, _ = run(backend(layout), p, AttnSpec(scale=0.125))
    assert torch.equal(out[2], torch.zeros_like(out[2])) and not out.isnan().any()
    changed = (p.kv.k != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(changed) == sorted([int(p.batch.tables[0][0, 1]), int(p.batch.tables[0][1, 0])])


def test_stale_nan_keys_of_another_request_do_not_leak() -> None:
    """Slots past a row's end may hold anything in K and any finite number in V."""
    torch.manual_seed(9)
    layout = Layout(block_size=64)
    spec = AttnSpec(scale=0.125)
    p = problem([(1, 20), (9, 30)], layout, num_decode=1)
    reference, _ = expected(p, spec)
    for row, ctx in enumerate((20, 30)):
        p.kv.k[p.batch.tables[0][row, 0], :, ctx:] = float("nan")
    out, _ = run(backend(layout), p, spec)
    assert max_error(out, reference) < 2e-5


def test_v_is_written_finite() -> None:
    layout = Layout(num_heads=2, num_kv_heads=1)
    p = problem([(2, 2)], layout, num_decode=0)
    p.v[0, 0, 0], p.v[1, 0, 3], p.k[0, 0, 1] = float("nan"), float("inf"), float("nan")
    run(backend(layout), p, AttnSpec(scale=0.125))
    block = p.batch.tables[0][0, 0]
    assert p.kv.v[block, 0, 0, 0] == 0 and p.kv.v[block, 0, 1, 3] == 0 and p.kv.k[block, 0, 0, 1].isnan()


def test_views_with_a_row_stride_are_read_and_written_in_place() -> None:
    torch.manual_seed(10)
    layout = Layout(num_heads=2, num_kv_heads=1)
    spec = AttnSpec(scale=0.125)
    p = problem([(1, 33), (12, 20)], layout, num_decode=1)
    reference, _ = expected(p, spec)
    packed = torch.cat([p.q.flatten(1), p.k.flatten(1), p.v.flatten(1)], dim=1)
    q, k, v = (x.unflatten(1, (-1, 64)) for x in packed.split([128, 64, 64], dim=1))
    wide = torch.full((13, 3, 64), float("nan"), device=DEVICE)
    attention = backend(layout)
    attention.prepare(p.batch)
    attention.forward(q, k, v, p.kv, p.batch, spec, wide[:, :2])
    assert max_error(wide[:, :2], reference) < 2e-5 and wide[:, 2].isnan().all()


def test_unsupported_shapes_are_refused_with_what_to_do() -> None:
    with pytest.raises(StartError, match=r"head_dim 72.*64, 80, 96, 128, 256.*auto"):
        backend(Layout(head_dim=72))
    with pytest.raises(StartError, match=r"block_size 24.*--block-size"):
        backend(Layout(block_size=24))
