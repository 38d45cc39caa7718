"""Packed weights: what was stored in few bits comes back, as near as scales in bfloat16 allow; the rest stays dense."""

from __future__ import annotations

import pytest
import torch

from steelyard.kernels.backend import Stored
from steelyard.kernels.cpu_linear import CHUNK_ROWS, FEW_ROWS, PackedWeight, linear, pack


def quantised(num_rows: int = 48, num_inputs: int = 96, bits: int = 4) -> tuple[torch.Tensor, Stored]:
    """A weight of random levels, and how a file of such a kind would hold it."""
    levels = torch.randint(0, 2**bits, (num_rows, num_inputs), dtype=torch.uint8)
    step = (torch.rand(num_rows, num_inputs // 32) * 0.3 + 0.01) / 2**bits
    low = torch.rand(num_rows, num_inputs // 32) * -0.2
    weight = levels.float() * step.repeat_interleave(32, 1) + low.repeat_interleave(32, 1)
    return weight, Stored("Q4_1" if bits == 4 else "Q5_1", bits, lambda: (levels, step, low))


def held(packed: PackedWeight, num_inputs: int) -> torch.Tensor:
    """The weight that products with few rows see."""
    unit = torch.eye(num_inputs)
    columns = [linear(unit[i : i + FEW_ROWS], packed, None) for i in range(0, num_inputs, FEW_ROWS)]
    return torch.cat(columns).T


@pytest.mark.parametrize(("bits", "form"), [(4, "int4"), (5, "int4x2"), (8, "int4x2")])
def test_packing_levels_loses_no_more_than_bfloat16_does(bits: int, form: str) -> None:
    torch.manual_seed(4)
    weight, stored = quantised(bits=bits)
    packed = pack(weight.bfloat16(), [stored])
    assert isinstance(packed, PackedWeight) and packed.form == form
    span = weight.view(48, 3, 32).abs().amax(-1, keepdim=True)
    assert ((held(packed, 96) - weight).view(48, 3, 32).abs() / span).max() < 0.01


@pytest.mark.parametrize("bits", [(4, 4, 4), (4, 8, 5)], ids=str)
def test_parts_of_a_fused_weight_are_packed_in_their_order(bits: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    rows = (CHUNK_ROWS, 32, 16)
    parts = [quantised(n, bits=b) for n, b in zip(rows, bits, strict=True)]
    weight = torch.cat([weight for weight, _ in parts])
    packed = pack(weight.bfloat16(), [stored for _, stored in parts])
    assert isinstance(packed, PackedWeight) and packed.form == ("int4x2" if 8 in bits else "int4")
    assert (held(packed, 96) - weight).norm() / weight.norm() < 0.01


def test_eight_bit_weights_and_bias() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(40, 64), torch.randn(40), torch.randn(3, 64)
    packed = pack(weight.bfloat16(), [Stored("Q6_K"), Stored("Q4_K")])
    assert isinstance(packed, PackedWeight) and packed.form == "int8"
    expected = x @ weight.T + bias
    assert (linear(x, packed, bias) - expected).norm() / expected.norm() < 0.02
    assert linear(x, packed, bias).dtype == torch.float32


def test_few_and_many_rows_agree() -> None:
    torch.manual_seed(6)
    weight, stored = quantised()
    packed, x = pack(weight.bfloat16(), [stored]), torch.randn(FEW_ROWS + 5, 96)
    many, few = linear(x, packed, None), linear(x[:FEW_ROWS], packed, None)
    assert (many[:FEW_ROWS] - few).norm() / few.norm() < 0.02


@pytest.mark.parametrize("kinds", [["F32"], ["BF16", "Q4_1"], []], ids=str)
def test_weights_not_stored_in_few_bits_are_not_packed(kinds: list[str]) -> None:
    weight = torch.randn(16, 32).bfloat16()
    packed = pack(weight, [Stored(kind) for kind in kinds])
    assert packed is weight or (isinstance(packed, PackedWeight) and packed.form == "none")
    x = torch.randn(3, 32).bfloat16()
    assert torch.allclose(linear(x, packed, None).float(), (x @ weight.T).float(), atol=0.1)


@pytest.mark.parametrize("missing", ["int4 operators", "oneDNN"])
def test_a_torch_without_an_operator_takes_another_way(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    weight, stored = quantised()
    if missing == "oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        monkeypatch.delattr(torch, "_weight_int4pack_mm_for_cpu")
    packed = pack(weight.bfloat16(), [stored])
    assert isinstance(packed, PackedWeight)
    assert packed.form == "int4" if missing == "oneDNN" else packed.form == "int8"
    for rows in (1, FEW_ROWS + 1):
        x = torch.randn(rows, 96)
        assert (linear(x, packed, None) - x @ weight.T).norm() / (x @ weight.T).norm() < 0.02


def test_float32_weights_are_never_packed_and_exact() -> None:
    weight, x = torch.randn(16, 32), torch.randn(2, 32)
    assert pack(weight, [Stored("Q4_1")]) is weight
    assert torch.equal(linear(x, weight, None), x @ weight.T)
