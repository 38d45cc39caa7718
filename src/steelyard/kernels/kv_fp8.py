"""Keys and values in eight bits: e4m3 numbers with one scale a KV head. The format, on any device; no attention here.

    value   stored = round(v / scale)   in e4m3, clipped to +-448      v ~ stored * scale
    key     stored = round(k T / scale)                                k ~ stored * scale T

e4m3 has a sign, four bits of exponent and three of mantissa (Micikevicius et al. 2022, "FP8 formats for deep
learning"): from 2^-6 to 448 every number is kept to one part in 16, whatever the scale. A scale only has to keep a
head's numbers inside that range. Attention never multiplies a tile by it: a key's scale goes into the softmax's, a
value's into the output.

T is a Hadamard matrix, orthonormal and symmetric. A key's channels that stand out are rounded by the largest amounts,
and they are the ones that queries weigh most; in T's basis each number holds a bit of every channel of its block, and
what rounding takes is spread evenly (incoherent processing: Shah et al. 2024, "FlashAttention-3", section 3.3; Ashkboos
et al. 2024, "QuaRot", section 4). Keys go into the basis when they are written, after their rotary turn, and queries
when they meet keys: (q T) . (k T) = q . k, so nothing else knows of it. Values stay as they are.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
HEADROOM = 4.0
"""How far beyond the largest number seen in a calibration a later one may be before it is clipped."""


@cache
def basis(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """T [D, D]: block-diagonal, the blocks the powers of two that D is the sum of, largest first (80: 64, 16).

    In a block of size B, T[i, j] is B^-0.5, negative where i and j share an odd number of bits (Sylvester 1867).
    """
    sizes = [1 << b for b in reversed(range(head_dim.bit_length())) if head_dim >> b & 1]
    blocks = []
    for size in sizes:
        block = torch.ones(1, 1, dtype=torch.float64)
        while len(block) < size:
            block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
        blocks.append(block * size**-0.5)
    return torch.block_diag(*blocks).to(device, dtype)


def hadamard(x: Tensor) -> Tensor:
    """x T for heads x [..., D]: float32, float64 of float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    return wide @ basis(x.shape[-1], wide.dtype, x.device)


def key_growth(head_dim: int) -> float:
    """How much larger a number of k T can be than the largest of k, as a power of two: at least the root of a block."""
    largest_block = head_dim.bit_length() - 1
    return 2.0 ** -(-largest_block // 2)


def to_stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [..., Hkv, D] as a pool of `dtype` holds it; scale float32 [Hkv], None where it is not fp8. NaN stays NaN.

    Keys of an fp8 pool come as `hadamard` of them.
    """
    if scale is None:
        return x.to(dtype)
    return (x.float() / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(dtype)


def as_bytes(pool: Tensor) -> Tensor:
    """An fp8 pool as uint8, for operators that move numbers and have no fp8 form; another pool is returned as it is."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def scale_for(largest: Tensor) -> Tensor:
    """The scale for heads whose largest magnitude is `largest` [Hkv]: a power of two with HEADROOM to spare.

    A power of two divides exactly, and small differences of a calibration do not move it. 1 where nothing is known.
    """
    scale = torch.exp2(torch.ceil(torch.log2(largest.float() * (HEADROOM / FP8_MAX))))
    return torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))
