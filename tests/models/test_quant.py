"""Dequantising packed blocks: bit-equal to the library that defines the formats, on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from steelyard.models.quant import FORMATS, LEVELS, dequantize, levels


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_every_block_format_equals_the_gguf_library_bit_for_bit(kind: str) -> None:
    block = FORMATS[kind]
    rng = np.random.default_rng(7)
    rows, blocks_per_row = 37, 5
    packed = rng.integers(0, 256, (rows, blocks_per_row * block.block_bytes), dtype=np.uint8)
    packed = _finite_scales(packed, kind)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    ours = dequantize(torch.from_numpy(packed).flatten(), kind, (rows, blocks_per_row * block.block_len))
    assert np.array_equal(ours.numpy().view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("kind", sorted(LEVELS))
def test_levels_times_step_plus_low_is_the_weight(kind: str) -> None:
    block = FORMATS[kind]
    rng = np.random.default_rng(8)
    packed = _finite_scales(rng.integers(0, 256, (9, 2 * block.block_bytes), dtype=np.uint8), kind)
    shape = (9, 2 * block.block_len)
    quants, step, low = levels(torch.from_numpy(packed).flatten(), kind, shape)
    assert quants.dtype == torch.uint8 and int(quants.max()) < 2 ** LEVELS[kind].bits
    found = quants.float() * step.repeat_interleave(32, 1) + low.repeat_interleave(32, 1)
    span = 255 * step.abs().repeat_interleave(32, 1) + low.abs().repeat_interleave(32, 1)
    assert ((found - dequantize(torch.from_numpy(packed).flatten(), kind, shape)).abs() <= 1e-6 * span).all()


def _finite_scales(packed: np.ndarray, kind: str) -> np.ndarray:
    """Clear the top exponent bit of every float16 scale: random ones would hold infinities and NaN."""
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(kind, (0, 2))
    blocks = packed.reshape(-1, FORMATS[kind].block_bytes).copy()
    for first in at:
        blocks[:, first + 1] &= 0xBF
    return blocks.reshape(packed.shape)
