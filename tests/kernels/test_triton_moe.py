"""Grouped expert products against a loop over tokens, with experts that get none, one and many pairs."""

from __future__ import annotations

import pytest
import torch

from steelyard.kernels import triton_moe
from steelyard.kernels.reference import gated
from steelyard.kernels.triton_moe import ExpertLayer, ExpertWeights, Tile, tile_for
from tests.kernels.paged import DEVICE, max_error


def expected(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for e, weight in zip(ids[t].tolist(), weights[t].double().tolist()):
            hidden = gated((x[t].double() @ experts.gate_up[e].double().T)[None], experts.activation)
            out[t] += (weight * (hidden @ experts.down[e].double().T)[0]).cpu()
    return out


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (23, 5, 2), (40, 3, 1)])
def test_experts_equal_a_loop_over_tokens(num_tokens: int, num_experts: int, top_k: int) -> None:
    torch.manual_seed(num_tokens)
    k, f = 72, 40
    experts = ExpertWeights(
        torch.randn(num_experts, 2 * f, k, device=DEVICE) * 0.2, torch.randn(num_experts, k, f, device=DEVICE) * 0.2
    )
    x, weights = torch.randn(num_tokens, k, device=DEVICE), torch.rand(num_tokens, top_k, device=DEVICE)
    # expert 1 gets nothing, so an expert without a block stands between two that have some
    allowed = torch.tensor([e for e in range(num_experts) if e != 1])
    ids = torch.stack([allowed[torch.randperm(len(allowed))[:top_k]] for _ in range(num_tokens)]).int().to(DEVICE)
    layer = ExpertLayer(experts, max_tokens=64, top_k=top_k)
    reference = expected(x, ids, weights, experts)
    outs = [layer(x, ids, weights, experts, torch.full_like(x, float("nan"))) for _ in range(2)]
    assert max_error(outs[0], reference) < 1e-5 and torch.equal(outs[0], outs[1])


def test_wide_tiles_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    monkeypatch.setattr(triton_moe, "tile_for", lambda *_: Tile(128, 64, 32, 4, 2))
    experts = ExpertWeights(torch.randn(2, 64, 48, device=DEVICE) * 0.2, torch.randn(2, 48, 32, device=DEVICE) * 0.2)
    x, weights = torch.randn(150, 48, device=DEVICE), torch.rand(150, 1, device=DEVICE)
    ids = (torch.arange(150) % 7 == 0).int()[:, None].to(DEVICE)
    out = ExpertLayer(experts, 150, 1)(x, ids, weights, experts, torch.full_like(x, float("nan")))
    assert max_error(out, expected(x, ids, weights, experts)) < 1e-5


def test_tiles_grow_with_the_pairs_of_an_expert() -> None:
    rows = [tile_for(pairs, 128, torch.bfloat16).rows for pairs in (8, 2048, 4096, 65536)]
    assert rows == [16, 16, 64, 128]
