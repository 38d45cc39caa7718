"""Attention as two products against float64, and inside the CPU backend against the reference."""

from __future__ import annotations

import pytest
import torch

from steelyard.kernels import cpu_products
from steelyard.kernels.attention import AttnSpec
from tests.kernels.test_cpu import MIXED, both, problem


@pytest.mark.parametrize("mask", ["causal", "added", "causal and a window added"])
@pytest.mark.parametrize("num_q", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("num_before", [0, 45])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_products_equal_float64(num_q: int, num_before: int, mask: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(num_q)
    num_keys = num_before + num_q
    q = torch.randn(2, 6, num_q, 24, dtype=dtype)
    k, v = torch.randn(2, 2, 2, num_keys, 24, dtype=dtype)
    hidden = torch.ones(num_q, num_keys, dtype=torch.bool).triu_(1 + num_before)
    if "window" in mask:
        hidden |= torch.ones(num_q, num_keys, dtype=torch.bool).tril_(num_before - 20)
    added = torch.zeros(2, 1, num_q, num_keys, dtype=dtype).masked_fill_(hidden, -torch.inf)
    found = cpu_products.attend(q, k, v, 0.2, added if "added" in mask else None, "causal" in mask)
    wide_k, wide_v = (x.double().repeat_interleave(3, dim=1) for x in (k, v))
    scores = (q.double() @ wide_k.transpose(-1, -2) * 0.2).masked_fill_(hidden, -torch.inf)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), torch.softmax(scores, -1) @ wide_v, atol=tolerance)


@pytest.mark.parametrize("window", [None, 24])
def test_mixed_rows_take_products_and_equal_the_reference(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    taken = []
    real = cpu_products.attend
    monkeypatch.setattr(cpu_products, "are_faster", lambda q, num_keys: True)
    monkeypatch.setattr(cpu_products, "attend", lambda *given: taken.append(given) or real(*given))
    found, expected = both(problem(MIXED, (9, 3, 64), 16, torch.bfloat16), AttnSpec(scale=0.125, window=window))
    assert len(taken) > 3
    assert torch.allclose(found.float(), expected.float(), atol=3e-2)


def test_products_are_not_chosen_beside_matrix_units_or_for_a_few_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    q = torch.empty(1, 9, 64, 64, dtype=torch.bfloat16)
    assert cpu_products.are_faster(q, 64)
    assert not cpu_products.are_faster(q[:, :, :1], 64)
    assert not cpu_products.are_faster(q.float(), 64)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not cpu_products.are_faster(q, 64)
