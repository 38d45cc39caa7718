"""The products of 2 to 16 tokens on the matrix units against float64, with whatever surrounds them."""

from __future__ import annotations

import itertools

import pytest
import torch

from steelyard.kernels import reference
from steelyard.kernels.triton_backend import TritonFusions
from steelyard.kernels.triton_linear import Fused
from steelyard.kernels.triton_tiles_linear import Tiles, tile_products
from tests.kernels.paged import DEVICE, max_error

KINDS = list(itertools.product((None, "silu", "gelu_tanh"), (False, True), (False, True), (False, True)))


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(torch.float16)


@pytest.mark.parametrize(
    ("tokens", "n", "k", "tiles"),
    [(2, 50, 192, Tiles(16, 32, 4)), (16, 24, 320, Tiles(8, 64, 4, 3)), (5, 32, 256, Tiles(16, 64, 4)),
     (11, 17, 330, Tiles(8, 16, 8, 2))],
)  # fmt: skip
def test_products_of_few_tokens_with_whatever_is_around_them(tokens: int, n: int, k: int, tiles: Tiles) -> None:
    for activation, norm, bias, residual in KINDS if tiles.columns == 32 else KINDS[::7]:
        torch.manual_seed(n)
        x, weight, scale = randn(tokens, k), randn(n * (2 if activation else 1), k, scale=k**-0.5), randn(k).float()
        offset, stream = randn(len(weight)), randn(tokens, n)
        expected = reference.rms_norm(x.double(), scale.double(), 1e-6) if norm else x.double()
        expected = expected @ weight.double().T + (offset.double() if bias else 0)
        if activation:
            expected = reference.gated(expected, activation)
        expected = expected + (stream.double() if residual else 0)
        around = Fused((scale, 1e-6) if norm else None, offset if bias else None, activation, residual)

        def run(rows: int, around: Fused = around, x: torch.Tensor = x, weight: torch.Tensor = weight,
                stream: torch.Tensor = stream) -> torch.Tensor:  # fmt: skip
            out = stream[:rows].clone() if around.residual else torch.full_like(stream[:rows], float("nan"))
            return tile_products(x[:rows].contiguous(), weight, out, around, tiles=tiles)

        out = run(tokens)
        assert max_error(out, expected) < 0.01 * float(expected.abs().max()), around
        assert torch.equal(run(1), out[:1]), "a token's result depends on its neighbours"


def test_tiles_are_for_bfloat16_and_short_rows_alone() -> None:
    """A norm's weight times the stream, before its scale, may be beyond float16."""
    fusions = TritonFusions(16, pdl=False)
    for dtype, tokens, columns, takes in (
        (torch.bfloat16, 2, 4096, True),
        (torch.bfloat16, 16, 4096, True),
        (torch.bfloat16, 17, 4096, False),
        (torch.bfloat16, 2, 4097, False),
        (torch.float16, 2, 4096, False),
        (torch.float16, 1, 14336, True),
        (torch.float32, 1, 14336, True),
        (torch.float32, 2, 1024, False),
    ):
        assert fusions.takes(torch.empty(tokens, 8, dtype=dtype), columns) == takes, (dtype, tokens, columns)
