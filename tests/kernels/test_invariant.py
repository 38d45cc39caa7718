"""The invariant operators: equal to the reference, and a token's bits do not depend on what is computed beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from steelyard.kernels.attention import AttnSpec, Batch, KvLayer
from steelyard.kernels.invariant import TILE, InvariantAttention, InvariantBackend
from steelyard.kernels.reference import ReferenceAttention
from steelyard.kernels.sampling import Controls
from tests.kernels.test_cpu import MIXED, problem

SPECS = {
    "plain": AttnSpec(scale=0.2),
    "window": AttnSpec(scale=0.2, window=24),
    "softcap and sinks": AttnSpec(scale=0.4, softcap=3.0, sinks=torch.tensor([0.3, -1.0, 2.0, 0.1, 0.0, -0.2])),
}


def run(attention: object, given: tuple[Tensor, Tensor, Tensor, KvLayer, Batch], spec: AttnSpec) -> Tensor:
    q, k, v, kv, batch = given
    kv = replace(kv, k=kv.k.clone(), v=kv.v.clone())
    out = torch.full((q.shape[0], q.shape[1], q.shape[2]), torch.nan, dtype=q.dtype)
    attention.prepare(batch)  # type: ignore[attr-defined]
    attention.forward(q, k, v, kv, batch, spec, out)  # type: ignore[attr-defined]
    return out


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_attention_equals_the_reference(block_size: int, spec: AttnSpec) -> None:
    given = problem(MIXED, (6, 2, 24), block_size, torch.float32)
    found, expected = run(InvariantAttention(), given, spec), run(ReferenceAttention(), given, spec)
    assert torch.allclose(found, expected, atol=2e-5), (found - expected).abs().max()


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_in_any_chunks_gives_the_same_bits(dtype: torch.dtype, spec: AttnSpec) -> None:
    """Each chunk is its own call: positions before it are in the pool, positions after it are stale."""
    length, heads = 131, (6, 2, 24)
    q, k, v, kv, batch = problem([(length, length)], heads, 16, dtype)
    whole = run(InvariantAttention(), (q, k, v, kv, batch), spec)
    for chunks in ([1] * length, [70, 61], [16, 15, 33, 67]):
        pool = replace(kv, k=kv.k.clone(), v=kv.v.clone())
        first = 0
        for count in chunks:
            part = slice(first, first + count)
            step = replace(
                batch,
                positions=batch.positions[part],
                slots=(batch.slots[0][part],),
                q_start=torch.tensor([0, count], dtype=torch.int32),
                ctx_len=torch.tensor([first + count], dtype=torch.int32),
                num_tokens=count,
            )
            out = torch.empty(count, *q.shape[1:], dtype=dtype)
            attention = InvariantAttention()
            attention.prepare(step)
            attention.forward(q[part], k[part], v[part], pool, step, spec, out)
            assert torch.equal(out, whole[part]), (chunks, first)
            first += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(576, 1536), (1536, 576), (64, 4099)])
def test_a_product_gives_a_token_the_same_bits_anywhere(dtype: torch.dtype, num_inputs: int, num_outputs: int) -> None:
    torch.manual_seed(num_inputs)
    backend = InvariantBackend()
    weight = torch.randn(num_outputs, num_inputs, dtype=dtype)
    packed = backend.pack(weight, ())
    token = torch.randn(1, num_inputs)
    alone = backend.linear(token, packed)
    assert torch.allclose(alone, token.to(dtype).float() @ weight.float().T, rtol=2e-2, atol=0.5)
    for num_before in range(2 * TILE):
        crowd = torch.cat([torch.randn(num_before, num_inputs), token, torch.randn(7, num_inputs)])
        assert torch.equal(backend.linear(crowd, packed)[num_before], alone[0]), num_before


def test_norms_and_gates_give_a_token_the_same_bits_anywhere() -> None:
    torch.manual_seed(0)
    backend = InvariantBackend()
    token, weight = torch.randn(1, 576), torch.randn(576)
    operators = {
        "norm": lambda x: backend.rms_norm(x, weight, 1e-5),
        "gate": lambda x: backend.gated(x, "silu"),
    }
    for name, operator in operators.items():
        alone = operator(token)
        for num_before in range(2 * TILE):
            crowd = torch.cat([torch.randn(num_before, 576), token, torch.randn(3, 576)])
            assert torch.equal(operator(crowd)[num_before], alone[0]), (name, num_before)


def test_draws_of_a_row_are_the_same_in_any_company() -> None:
    torch.manual_seed(1)
    backend, logits, u = InvariantBackend(), torch.randn(9, 50_000), torch.rand(9, dtype=torch.float64)
    for top_p in (None, torch.full((9,), 0.8)):
        together = backend.choose(logits, u, Controls(torch.ones(9), top_p=top_p))
        alone = [
            backend.choose(
                logits[i : i + 1],
                u[i : i + 1],
                Controls(torch.ones(1), top_p=None if top_p is None else top_p[i : i + 1]),
            )
            for i in range(9)
        ]
        assert together.tolist() == torch.cat(alone).tolist()
