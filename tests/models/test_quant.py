"""Dequantising packed blocks: bit-equal to the library that defines the formats, on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from steelyard.models.quant import FORMATS, dequantize


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


def _finite_scales(packed: np.ndarray, kind: str) -> np.ndarray:
    """Clear the top exponent bit of every float16 scale: random ones would hold infinities and NaN."""
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(kind, (0, 2))
    blocks = packed.reshape(-1, FORMATS[kind].block_bytes).copy()
    for first in at:
        blocks[:, first + 1] &= 0xBF
    return blocks.reshape(packed.shape)
