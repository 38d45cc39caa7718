"""The CPU backend against the reference: odd sizes, mixed rows, outputs poisoned with NaN, pools with stale garbage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from steelyard.kernels.attention import AttnSpec, Batch, KvLayer
from steelyard.kernels.cpu import CpuBackend
from steelyard.kernels.cpu_attention import CpuAttention
from steelyard.kernels.reference import ReferenceAttention, ReferenceBackend
from steelyard.kernels.sampling import Controls, choose

MIXED = [(1, 1), (1, 16), (1, 17), (1, 200), (5, 5), (16, 33), (3, 90), (2, 5), (70, 70), (80, 131)]


def problem(
    rows: list[tuple[int, int]], heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, layers: int = 2
) -> tuple[Tensor, Tensor, Tensor, KvLayer, Batch]:
    """rows: (new tokens, context with them). Layer 1 of a block-major pool; tables end in other rows' blocks."""
    torch.manual_seed(len(rows))
    num_heads, num_kv_heads, dim = heads
    needs = [-(-ctx // block_size) for _, ctx in rows]
    order = (torch.randperm(sum(needs)) + 1).split(needs)
    whole = torch.randn(sum(needs) + 1, layers, 2, num_kv_heads, block_size, dim, dtype=dtype)
    whole[0] = 0
    table = torch.randint(1, sum(needs) + 1, (len(rows), max(needs)), dtype=torch.int32)
    slots, positions = [], []
    for row, ((new, ctx), blocks) in enumerate(zip(rows, order)):
        table[row, : len(blocks)] = blocks.int()
        at = torch.arange(ctx - new, ctx)
        positions.append(at)
        slots.append(blocks[at // block_size] * block_size + at % block_size)
    counts = torch.tensor([0] + [new for new, _ in rows])
    total = int(counts.sum())
    batch = Batch(
        positions=torch.cat(positions),
        slots=(torch.cat(slots),),
        q_start=counts.cumsum(0).int(),
        ctx_len=torch.tensor([ctx for _, ctx in rows], dtype=torch.int32),
        tables=(table,),
        num_tokens=total,
        num_decode=sum(new == 1 for new, _ in rows),
        max_q=max(new for new, _ in rows),
        max_ctx=max(ctx for _, ctx in rows),
    )
    qkv = torch.randn(total, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v, KvLayer(whole[:, 1, 0], whole[:, 1, 1], block_size), batch


def both(problem_: tuple[Tensor, Tensor, Tensor, KvLayer, Batch], spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """(CPU backend's, reference's) output; the pools must hold the same afterwards."""
    q, k, v, kv, batch = problem_
    other = replace(kv, k=kv.k.clone(), v=kv.v.clone())
    outs = []
    for backend, pool in ((CpuAttention(), kv), (ReferenceAttention(), other)):
        out = torch.full((q.shape[0], q.shape[1], q.shape[2]), torch.nan, dtype=q.dtype)
        backend.prepare(batch)
        backend.forward(q, k, v, pool, batch, spec, out)
        outs.append(out)
    for ours, theirs in ((kv.k, other.k), (kv.v, other.v)):
        assert torch.equal(ours.nan_to_num(9e9), theirs.nan_to_num(9e9))
    return outs[0], outs[1]


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 16), (8, 1, 24), (6, 2, 40)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 24], ids=lambda w: f"window{w}")
def test_mixed_rows_equal_the_reference(heads: tuple[int, int, int], block_size: int, window: int | None) -> None:
    found, expected = both(problem(MIXED, heads, block_size, torch.float32), AttnSpec(scale=0.2, window=window))
    assert torch.allclose(found, expected, atol=2e-5), (found - expected).abs().max()


@pytest.mark.parametrize(
    "rows", [[(1, 7)], [(9, 9)], [(4, 21)], [(1, 5)] * 7, [(20, 20)] * 3, [(1, 3), (1, 900)]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rows_of_one_kind_equal_the_reference(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    found, expected = both(problem(rows, (9, 3, 64), 16, dtype), AttnSpec(scale=0.125))
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    assert torch.allclose(found.double(), expected.double(), atol=tolerance)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcap_sinks_and_lse_equal_the_reference(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    sinks = torch.randn(6) if with_sinks else None
    spec = AttnSpec(scale=0.4, window=window, softcap=softcap, sinks=sinks, want_lse=True)
    q, k, v, kv, batch = problem(MIXED, (6, 2, 16), 16, torch.float32)
    results = []
    for backend in (CpuAttention(), ReferenceAttention()):
        out = torch.full_like(q, torch.nan).contiguous()
        backend.prepare(batch)
        results.append((out, backend.forward(q, k, v, kv, batch, spec, out)))
    (out, lse), (expected, expected_lse) = results
    assert lse is not None and expected_lse is not None
    assert torch.allclose(out, expected, atol=2e-5) and torch.allclose(lse, expected_lse, atol=2e-5)


def test_blocks_that_a_stale_table_entry_names_are_not_read() -> None:
    """A row's table beyond its end may name a block of a former owner, and that block may hold NaN."""
    q, k, v, kv, batch = problem([(1, 40), (1, 60), (3, 38)], (6, 2, 16), 16, torch.float32)
    whole = torch.cat([kv.k, kv.k[:1]]), torch.cat([kv.v, kv.v[:1]])
    for pool in whole:
        pool[-1] = torch.nan
    batch.tables[0][[0, 2], 3] = len(whole[0]) - 1
    out, _ = both((q, k, v, KvLayer(*whole, 16), batch), AttnSpec(scale=0.2))
    assert out.isfinite().all()


def test_padding_slots_are_never_written_and_null_block_stays_zero() -> None:
    q, k, v, kv, batch = problem(MIXED, (6, 2, 16), 16, torch.float32)
    slots = batch.slots[0].clone()
    slots[[0, 9, 30]] = -1
    before = kv.k.clone()
    backend = CpuAttention()
    batch = replace(batch, slots=(slots,))
    backend.prepare(batch)
    backend.forward(q, k, v, kv, batch, AttnSpec(scale=0.2), torch.empty(q.shape))
    changed = (kv.k != before).any(-1).any(1).flatten().nonzero().flatten().tolist()
    assert changed == sorted(int(s) for s in slots if s >= 0)
    assert not kv.k[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_operators_equal_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, truth = CpuBackend(), ReferenceBackend()
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    x, other, weight = torch.randn(7, 48, dtype=dtype), torch.randn(7, 48, dtype=dtype), torch.randn(48)

    def close(a: Tensor, b: Tensor) -> bool:
        return a.dtype == b.dtype and torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance)

    assert close(ours.rms_norm(x, weight, 1e-5), truth.rms_norm(x, weight, 1e-5))
    for a, b in zip(ours.add_rms_norm(x, other.clone(), weight, 1e-5), truth.add_rms_norm(x, other, weight, 1e-5)):
        assert close(a, b)
    for activation in ("silu", "gelu", "gelu_tanh"):
        assert close(ours.gated(x.clone(), activation), truth.gated(x, activation))
    heads, cos_sin = torch.randn(7, 9, 16, dtype=dtype), torch.randn(7, 12)
    assert close(ours.rotate(heads.clone(), cos_sin), truth.rotate(heads, cos_sin))
    assert close(ours.linear(x, other, None), truth.linear(x, other, None))


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0], ids=["flat", "middling", "peaked"])
def test_choice_equals_the_full_sort(scale: float) -> None:
    """Flat rows keep more tokens than the candidate lists hold: the wide path must agree too."""
    torch.manual_seed(int(scale * 10))
    rows, vocab = 24, 9000
    logits = torch.randn(rows, vocab) * scale
    logits[:4] = logits[:4].round()  # many ties
    u = torch.rand(rows, dtype=torch.float64)
    controls = Controls(
        temperature=torch.rand(rows) + 0.5,
        min_p=torch.where(torch.rand(rows) < 0.5, 0.0, 0.02),
        top_k=torch.tensor([0, 1, 5, 300, 5000, 20000] * 4, dtype=torch.int32),
        top_p=torch.where(torch.rand(rows) < 0.3, 1.0, torch.rand(rows) * 0.98 + 0.01),
    )
    assert choose(logits, u, controls).tolist() == ReferenceBackend().choose(logits, u, controls).tolist()


def test_choice_of_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(2)
    logits, u = torch.randn(9, 3000), torch.rand(9, dtype=torch.float64)
    numbers = torch.rand(9), torch.full((9,), 7, dtype=torch.int32), torch.full((9,), 0.9)
    whole = choose(logits, u, Controls(numbers[0] + 0.1, None, numbers[1], numbers[2])).tolist()
    for i in range(9):
        alone = Controls(numbers[0][i : i + 1] + 0.1, None, numbers[1][i : i + 1], numbers[2][i : i + 1])
        assert choose(logits[i : i + 1], u[i : i + 1], alone).tolist() == whole[i : i + 1]
