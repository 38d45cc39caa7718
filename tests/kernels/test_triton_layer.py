"""Norm, rotary + KV write, activation, embedding and few-token linear kernels against their plain twins."""

from __future__ import annotations

import pytest
import torch

from steelyard.kernels import reference
from steelyard.kernels.attention import KvLayer
from steelyard.kernels.triton_act import embed, gated
from steelyard.kernels.triton_linear import Fused, gemv
from steelyard.kernels.triton_norm import rms_norm
from steelyard.kernels.triton_rope_kv import qk_norm_rope_write
from tests.kernels.paged import DEVICE, max_error


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("size", [64, 576, 3072])
def test_rms_norm_adds_the_residual_first(size: int) -> None:
    torch.manual_seed(size)
    x, residual, weight = randn(3, size + 8)[:, :size], randn(3, size), randn(size)
    total = residual.double() + x.double()
    expected = reference.rms_norm(total, weight.double(), 1e-5)
    plain = rms_norm(x, weight, 1e-5, poisoned(3, size))
    assert max_error(plain, reference.rms_norm(x.double(), weight.double(), 1e-5)) < 1e-5
    out = rms_norm(x, weight, 1e-5, poisoned(3, size), residual)
    assert max_error(out, expected) < 1e-5 and max_error(residual, total) < 1e-6


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gated_activation(activation: str) -> None:
    torch.manual_seed(1)
    x = randn(3, 2 * 1300) * 3
    x[0, 0], x[0, 1] = 90.0, -90.0
    out = gated(x, activation, poisoned(3, 1300))
    assert max_error(out, reference.gated(x.double(), activation)) < 1e-5


def test_embedding_rows_are_gathered_and_scaled() -> None:
    table, ids = randn(50, 100), torch.tensor([3, 49, 0, 3], device=DEVICE)
    assert max_error(embed(ids, table, poisoned(4, 100), 2.5), table[ids] * 2.5) < 1e-6


@pytest.mark.parametrize(
    ("heads", "rot", "norm", "by_position"),
    [((4, 2, 64), 64, True, True), ((3, 1, 80), 80, False, False), ((6, 2, 96), 32, True, True)],
)
def test_norm_turn_and_write_in_one_pass(heads: tuple[int, int, int], rot: int, norm: bool, by_position: bool) -> None:
    torch.manual_seed(rot)
    hq, hk, dim = heads
    num_tokens, block = 5, 16
    packed = randn(num_tokens, (hq + 2 * hk) * dim)
    before = packed.double().unflatten(1, (hq + 2 * hk, dim))
    q_weight, k_weight = randn(dim), randn(dim)
    positions = torch.tensor([7, 0, 90, 3, 41], device=DEVICE)
    angles = torch.outer(torch.arange(100.0), 10000 ** (-torch.arange(rot // 2) / (rot // 2))).to(DEVICE)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    layer = KvLayer(torch.zeros(4, hk, block, dim, device=DEVICE), torch.zeros(4, hk, block, dim, device=DEVICE), block)
    slots = torch.tensor([17, 63, -1, 16, 30], device=DEVICE)
    chosen = cos_sin[positions]
    qk_norm_rope_write(
        packed, heads, cos_sin if by_position else chosen, positions if by_position else None,
        (q_weight, k_weight, 1e-6) if norm else None, (layer, slots),
    )  # fmt: skip
    q, k, v = before.split([hq, hk, hk], dim=1)
    if norm:
        q, k = reference.rms_norm(q, q_weight.double(), 1e-6), reference.rms_norm(k, k_weight.double(), 1e-6)
    q, k = reference.rotate(q, chosen.double()), reference.rotate(k, chosen.double())
    after = packed.unflatten(1, (hq + 2 * hk, dim))
    assert max_error(after, torch.cat([q, k, v], dim=1)) < 1e-5
    expected = KvLayer(torch.zeros_like(layer.k, dtype=torch.float64), torch.zeros_like(layer.v).double(), block)
    reference.write_kv(k, v, expected, slots)
    assert max_error(layer.k, expected.k) < 1e-5 and max_error(layer.v, expected.v) < 1e-5


def test_v_with_a_nan_is_written_as_zero() -> None:
    packed = randn(1, 4 * 64)
    packed[0, 3 * 64 + 5] = float("nan")
    layer = KvLayer(torch.zeros(2, 1, 16, 64, device=DEVICE), torch.zeros(2, 1, 16, 64, device=DEVICE), 16)
    cos_sin = torch.ones(1, 64, device=DEVICE)
    qk_norm_rope_write(packed, (2, 1, 64), cos_sin, kv=(layer, torch.tensor([16], device=DEVICE)))
    assert layer.v[1, 0, 0, 5] == 0 and not layer.v.isnan().any() and layer.v[1, 0, 0, 6] == packed[0, 3 * 64 + 6]


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"], ids=str)
@pytest.mark.parametrize(("n", "k"), [(50, 192), (64, 576), (24, 4096)])
def test_gemv_with_whatever_is_around_it(
    n: int, k: int, activation: str | None, norm: bool, bias: bool, residual: bool
) -> None:
    torch.manual_seed(n)
    x, weight, scale = randn(1, k), randn(n * (2 if activation else 1), k) * 0.1, randn(k)
    offset, stream = randn(len(weight)), randn(1, n)
    expected = reference.rms_norm(x.double(), scale.double(), 1e-6) if norm else x.double()
    expected = expected @ weight.double().T + (offset.double() if bias else 0)
    if activation:
        expected = reference.gated(expected, activation)
    around = Fused((scale, 1e-6) if norm else None, offset if bias else None, activation, residual)
    out = gemv(x, weight, stream.clone() if residual else poisoned(1, n), around)
    assert max_error(out, expected + (stream.double() if residual else 0)) < 1e-5
