"""Linear layers on a CPU in two forms of each weight: packed int4 or int8 for few rows, bfloat16 for many.

    rows <= FEW_ROWS   reading the weight is the cost: 4 or 8 bits an element, unpacked in registers
    more               arithmetic is the cost: bfloat16 matrix units (AMX) where the CPU has them

A weight is packed only if its checkpoint holds it in blocks of that few bits. Four bits are packed from the stored
levels themselves: scales are rounded to bfloat16 and nothing else is taken away. Eight bits get one scale a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.kernels.backend import Stored

FEW_ROWS = 4
GROUP = 32
CHUNK_ROWS = 512
INT8_KINDS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """dense bfloat16 [N, K]; `packed` and `scales` as the operator for `bits` wants them."""

    dense: Tensor
    packed: Tensor
    scales: Tensor
    bits: int


Weight: TypeAlias = Tensor | PackedWeight


def pack(weight: Tensor, stored: Sequence[Stored]) -> Weight:
    """The packed form of a bfloat16 weight [N, K] whose rows were stored so; itself where none fits."""
    if weight.dtype != torch.bfloat16 or not stored:
        return weight
    if weight.shape[1] % GROUP == 0 and weight.shape[0] % 16 == 0 and all(part.levels for part in stored):
        return PackedWeight(weight, *pack_int4(stored), 4)
    if all(part.kind in INT8_KINDS for part in stored):
        return PackedWeight(weight, *pack_int8(weight), 8)
    return weight


def pack_int4(stored: Sequence[Stored]) -> tuple[Tensor, Tensor]:
    """(packed, scales and zeros bfloat16 [K / 32, N, 2]): groups of 32 along K, w = (level - 8) scale + zero."""
    parts = [part.levels() for part in stored if part.levels is not None]
    levels, step, low = (torch.cat(some) if len(parts) > 1 else some[0] for some in zip(*parts, strict=True))
    packed = torch._convert_weight_to_int4pack_for_cpu(levels.to(torch.int32), 1)
    scales = torch.empty(step.shape[1], step.shape[0], 2, dtype=torch.bfloat16)
    scales[..., 0] = step.T
    scales[..., 1] = torch.add(low, step, alpha=8).T
    return packed, scales


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [N, K], scales bfloat16 [N]): symmetric, a scale a row."""
    packed = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=torch.bfloat16)
    for first in range(0, weight.shape[0], CHUNK_ROWS):  # so that the passes over a chunk stay in a core's cache
        wide = weight[first : first + CHUNK_ROWS].float()
        scale = torch.linalg.vector_norm(wide, torch.inf, dim=-1).div_(127).clamp_(min=1e-12).to(torch.bfloat16)
        scales[first : first + CHUNK_ROWS] = scale
        packed[first : first + CHUNK_ROWS] = wide.div_(scale.float()[:, None]).round_().clamp_(-127, 127)
    return packed, scales


def dtype_of(weight: Weight) -> torch.dtype:
    """What products with the weight are computed in."""
    return weight.dtype if isinstance(weight, Tensor) else weight.dense.dtype


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, N] in x's dtype; see Backend.linear."""
    return product(x, weight, bias).to(x.dtype)


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, N] in the weight's dtype."""
    narrow = x.to(dtype_of(weight))
    if isinstance(weight, Tensor):
        return functional.linear(narrow, weight, bias)
    if x.shape[0] > FEW_ROWS:
        return functional.linear(narrow, weight.dense, bias)
    if weight.bits == 4:
        found = torch._weight_int4pack_mm_for_cpu(narrow, weight.packed, GROUP, weight.scales)
    else:
        found = torch._weight_int8pack_mm(narrow, weight.packed, weight.scales)
    return found if bias is None else found.add_(bias)
