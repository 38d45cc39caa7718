"""Packed weights: what was stored in few bits comes back, as near as scales in bfloat16 allow; the rest stays dense."""

from __future__ import annotations

import pytest
import torch

from steelyard.kernels.cpu_linear import FEW_ROWS, PackedWeight, linear, pack


def four_bit(kind: str, unused_levels: bool) -> torch.Tensor:
    """[48, 96] as a file of that kind would hold it: blocks of 32 with a step, and an offset or not."""
    torch.manual_seed(4)
    levels = torch.randint(2 if unused_levels else 0, 14 if unused_levels else 16, (48, 3, 32)).float()
    step = torch.rand(48, 3, 1) * 0.02 + 0.001
    if kind == "Q4_0":
        levels[..., 0] = 0
        return ((levels - 8) * step).view(48, 96)
    return (levels * step - torch.rand(48, 3, 1) * 0.2).view(48, 96)


@pytest.mark.parametrize("unused_levels", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_weights_lose_no_more_than_bfloat16_does(kind: str, unused_levels: bool) -> None:
    weight = four_bit(kind, unused_levels)
    packed = pack(weight.bfloat16(), {kind})
    assert isinstance(packed, PackedWeight) and packed.bits == 4
    unit = torch.eye(96)
    held = torch.cat([linear(unit[i : i + FEW_ROWS], packed, None) for i in range(0, 96, FEW_ROWS)]).T
    span = weight.view(48, 3, 32).abs().amax(-1, keepdim=True)
    assert ((held - weight).view(48, 3, 32).abs() / span).max() < 0.02


def test_eight_bit_weights_and_bias() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(40, 64), torch.randn(40), torch.randn(3, 64)
    packed = pack(weight.bfloat16(), {"Q8_0", "Q4_1"})
    assert isinstance(packed, PackedWeight) and packed.bits == 8
    expected = x @ weight.T + bias
    assert (linear(x, packed, bias) - expected).norm() / expected.norm() < 0.02
    assert linear(x, packed, bias).dtype == torch.float32


def test_few_and_many_rows_agree() -> None:
    weight = four_bit("Q4_1", False)
    packed, x = pack(weight.bfloat16(), {"Q4_1"}), torch.randn(FEW_ROWS + 5, 96)
    many, few = linear(x, packed, None), linear(x[:FEW_ROWS], packed, None)
    assert (many[:FEW_ROWS] - few).norm() / few.norm() < 0.02


@pytest.mark.parametrize("kinds", [{"F32"}, {"BF16", "Q4_1"}, set()], ids=str)
def test_weights_not_stored_in_few_bits_are_not_packed(kinds: set[str]) -> None:
    weight = torch.randn(16, 32).bfloat16()
    assert pack(weight, kinds) is weight


def test_float32_weights_are_never_packed_and_exact() -> None:
    weight, x = torch.randn(16, 32), torch.randn(2, 32)
    assert pack(weight, {"Q4_1"}) is weight
    assert torch.equal(linear(x, weight, None), x @ weight.T)
