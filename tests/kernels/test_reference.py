"""The reference against formulas written out in float64, element by element: it is what everything else is held to."""

from __future__ import annotations

import math

import pytest
import torch

from steelyard.kernels.attention import AttnSpec, KvLayer
from steelyard.kernels.reference import activate, attend_row, rms_norm, rotate, sample_row, write_kv


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_is_the_formula(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(1)
    num_q, num_keys, heads, kv_heads, dim = 4, 9, 6, 2, 5
    q, k, v = (torch.randn(n, h, dim, dtype=torch.float64) for n, h in ((4, 6), (9, 2), (9, 2)))
    sinks = torch.randn(heads, dtype=torch.float64) if with_sinks else None
    spec = AttnSpec(scale=0.7, window=window, softcap=softcap, sinks=sinks)
    out, lse = attend_row(q, k, v, spec)
    for i in range(num_q):
        position = num_keys - num_q + i
        for h in range(heads):
            kv_head = h // (heads // kv_heads)
            seen = [j for j in range(num_keys) if j <= position and (window is None or j > position - window)]
            logits = [0.7 * sum(float(q[i, h, d] * k[j, kv_head, d]) for d in range(dim)) for j in seen]
            if softcap:
                logits = [softcap * math.tanh(x / softcap) for x in logits]
            total = sum(math.exp(x) for x in logits) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
            expected = [
                sum(math.exp(x) * float(v[j, kv_head, d]) for x, j in zip(logits, seen)) / total for d in range(dim)
            ]
            assert out[i, h].tolist() == pytest.approx(expected, abs=1e-12)
            assert float(lse[i, h]) == pytest.approx(math.log(total), abs=1e-12)


def test_padding_slots_are_never_written() -> None:
    kv = KvLayer(torch.zeros(3, 2, 4, 5), torch.zeros(3, 2, 4, 5), 4)
    write_kv(torch.ones(3, 2, 5), torch.ones(3, 2, 5), kv, torch.tensor([-1, 6, -1]))
    assert float(kv.k.sum()) == 10 and float(kv.k[1, :, 2].sum()) == 10 and torch.equal(kv.k, kv.v)


def test_rms_norm_is_the_formula() -> None:
    x, weight = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([2.0, 10.0])
    root = math.sqrt(12.5 + 0.5)
    assert rms_norm(x, weight, 0.5)[0].tolist() == pytest.approx([6 / root, 40 / root], abs=1e-12)


def test_rotation_turns_pairs_and_leaves_the_rest() -> None:
    angle = 0.3
    cos_sin = torch.tensor([[math.cos(angle), 1.0, math.sin(angle), 0.0]], dtype=torch.float64)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]], dtype=torch.float64)
    turned = rotate(x, cos_sin)[0, 0].tolist()
    c, s = math.cos(angle), math.sin(angle)
    assert turned == pytest.approx([c - 3 * s, 2.0, 3 * c + s, 4.0, 5.0], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations_are_the_named_functions(name: str, expected: object) -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    assert torch.allclose(activate(x, name), expected(x), atol=1e-12)  # type: ignore[operator]


def test_a_sampled_token_is_the_inverse_cdf_in_id_order() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    picks = [sample_row(logits, u, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) for u in (0.05, 0.3, 0.6, 0.95)]
    assert picks == [0, 1, 2, 3]
    only_two = {sample_row(logits, u / 10, temperature=1.0, top_k=2, top_p=1.0, min_p=0.0) for u in range(10)}
    assert only_two == {1, 3}
    nucleus = {sample_row(logits, u / 10, temperature=1.0, top_k=0, top_p=0.75, min_p=0.0) for u in range(10)}
    assert nucleus == {1, 2, 3}
    likely = {sample_row(logits, u / 10, temperature=1.0, top_k=0, top_p=1.0, min_p=0.6) for u in range(10)}
    assert likely == {1, 3}
