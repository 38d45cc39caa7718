"""Keys and values in eight bits: e4m3 numbers with one scale a KV head. The format, on any device; no attention here.

    stored = round(x / scale) in e4m3, clipped to +-448        x ~ stored * scale

e4m3 has a sign, four bits of exponent and three of mantissa (Micikevicius et al. 2022, "FP8 formats for deep
learning"): from 2^-6 to 448 every number is kept to one part in 16, whatever the scale. A scale only has to keep a
head's numbers inside that range. Attention never multiplies a tile by it: a key's scale goes into the softmax's, a
value's into the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
HEADROOM = 4.0
"""How far beyond the largest number seen in a calibration a later one may be before it is clipped."""


def to_stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [..., Hkv, D] as a pool of `dtype` holds it; scale float32 [Hkv], None where it is not fp8. NaN stays NaN."""
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
