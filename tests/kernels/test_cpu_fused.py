"""The CPU's fused products against the plain operators of the reference, one after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steelyard.kernels.attention import KvLayer
from steelyard.kernels.cpu_fused import CpuFusions
from steelyard.kernels.cpu_kv import KvWriter
from steelyard.kernels.cpu_linear import pack
from steelyard.kernels.reference import ReferenceBackend, rms_norm, write_kv

TRUTH = ReferenceBackend()


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    return bool((found.float() - expected.float()).norm() <= tolerance * expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("num_tokens", [1, 4, 23])
def test_product_is_norm_linear_gate_and_addition(num_tokens: int, activation: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(num_tokens)
    x, weight, bias = torch.randn(num_tokens, 64), torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    norm, stream = torch.rand(64) + 0.5, torch.randn(num_tokens, 96 if activation is None else 48)
    expected = TRUTH.linear(rms_norm(x, norm, 1e-5), weight.float(), bias.float())
    if activation is not None:
        expected = TRUTH.gated(expected, activation)
    fusions, packed = CpuFusions(KvWriter()), pack(weight.clone(), [])
    found = fusions.product(x, packed, bias=bias, norm=(norm, 1e-5), activation=activation)
    assert found.dtype == dtype and near(found, expected, dtype)
    total = stream.clone()
    added = fusions.product(x, packed, bias=bias, norm=(norm, 1e-5), activation=activation, add_to=total)
    assert added is total and near(total, stream + expected, dtype)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("rotated", [16, 8], ids=["whole", "partial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_are_normed_turned_and_written(dtype: torch.dtype, rotated: int, with_norm: bool) -> None:
    torch.manual_seed(rotated)
    num_q, num_kv, dim, num_tokens = 6, 2, 16, 9
    qkv = torch.randn(num_tokens, (num_q + 2 * num_kv) * dim).to(dtype)
    cos_sin = torch.randn(num_tokens, rotated)
    norm = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5, 1e-5) if with_norm else None
    slots = torch.tensor([16, 17, -1, 33, 34, 35, 36, 37, 38])
    pools = [[torch.zeros(5, num_kv, 16, dim, dtype=dtype) for _ in range(2)] for _ in range(2)]
    kv, expected_kv = (KvLayer(k, v, 16) for k, v in pools)
    heads = qkv.clone().view(num_tokens, -1, dim)
    q, k, v = heads.split([num_q, num_kv, num_kv], dim=1)
    if norm is not None:
        q, k = rms_norm(q, norm[0], norm[2]), rms_norm(k, norm[1], norm[2])
    q, k = TRUTH.rotate(q, cos_sin), TRUTH.rotate(k, cos_sin)
    write_kv(k, v, expected_kv, slots)
    CpuFusions(KvWriter()).turn_and_write(qkv, (num_q, num_kv, dim), cos_sin, norm, kv, slots)
    assert near(qkv.view(num_tokens, -1, dim)[:, :num_q], q, dtype)
    assert near(kv.k, expected_kv.k, dtype) and torch.equal(kv.v, expected_kv.v)
    assert kv.v[2].any() and not kv.v[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_equal_a_loop_over_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weights = torch.randn(11, 32), torch.rand(11, 2)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(11)])
    chosen[chosen == 3] = 4  # nobody goes to expert 3
    gate_up, down = torch.randn(5, 48, 32).to(dtype), torch.randn(5, 32, 24).to(dtype)
    expected = torch.zeros(11, 32)
    for t in range(11):
        for rank, expert in enumerate(chosen[t].tolist()):
            inner = TRUTH.gated(x[t : t + 1] @ gate_up[expert].float().T, "silu")
            expected[t] += weights[t, rank] * (inner @ down[expert].float().T)[0]
    found = CpuFusions(KvWriter()).experts(x, chosen, weights, (gate_up, down, "silu"))
    assert near(found, expected, dtype)
