"""The baselines of attention against the reference: mixed rows, stale blocks, windows, caps, sinks, small parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from steelyard.kernels import gathered
from steelyard.kernels.attention import AttnSpec
from steelyard.kernels.gathered import GatheredAttention
from steelyard.kernels.reference import ReferenceAttention
from tests.kernels.test_cpu import MIXED, problem

ROWS = sorted(MIXED, key=lambda row: row[0] > 1)


@pytest.mark.parametrize("name", ["naive", "sdpa"])
@pytest.mark.parametrize("change", [{}, {"window": 40}, {"softcap": 5.0}, {"sinks": True}, {"causal": False}])
@pytest.mark.parametrize("most", [2**28, 2**14])
def test_baselines_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, name: str, change: dict[str, object], most: int
) -> None:
    monkeypatch.setattr(gathered, "MAX_ELEMENTS", most)
    q, k, v, kv, batch = problem(ROWS, (6, 2, 16), 16, torch.float32)
    if change.get("sinks"):
        change = {"sinks": torch.randn(6)}
    spec = AttnSpec(scale=0.25, **change)  # type: ignore[arg-type]
    other = replace(kv, k=kv.k.clone(), v=kv.v.clone())
    outs = [torch.full_like(q, float("nan")) for _ in range(2)]
    for backend, pool, out in zip((GatheredAttention(name), ReferenceAttention()), (kv, other), outs):
        backend.prepare(batch)
        backend.forward(q, k, v, pool, batch, spec, out)
    assert torch.allclose(outs[0], outs[1], atol=2e-5)
    assert torch.equal(kv.k, other.k) and torch.equal(kv.v, other.v)


def test_log_sum_exp_is_the_reference_s() -> None:
    q, k, v, kv, batch = problem(ROWS, (4, 2, 16), 16, torch.float32)
    spec = AttnSpec(scale=0.25, want_lse=True)
    found = [
        b.forward(q, k, v, kv, batch, spec, torch.empty_like(q))
        for b in (GatheredAttention("sdpa"), ReferenceAttention())
    ]
    assert found[0] is not None and found[1] is not None and torch.allclose(found[0], found[1], atol=1e-5)


def test_naive_holds_every_score_and_sdpa_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, kv, batch = problem([(1, 9), (8, 8)], (4, 2, 16), 16, torch.float32)
    seen: list[tuple[int, ...]] = []
    real = gathered.materialised
    monkeypatch.setattr(
        gathered, "materialised", lambda q, k, *rest: seen.append((*q.shape[:3], k.shape[2])) or real(q, k, *rest)
    )
    for name in ("sdpa", "naive"):
        GatheredAttention(name).forward(q, k, v, kv, batch, AttnSpec(scale=0.25), torch.empty_like(q))
    assert seen == [(1, 4, 1, 9), (1, 4, 8, 9)]
    padding = replace(batch, max_ctx=0)
    out = torch.full_like(q, float("nan"))
    GatheredAttention("naive").forward(q, None, None, kv, padding, AttnSpec(scale=0.25), out)
    assert not out.any()
