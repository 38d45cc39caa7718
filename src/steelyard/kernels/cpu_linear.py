"""Linear layers on a CPU in two forms of each weight: packed int4 or int8 for few rows, bfloat16 for many.

    rows <= FEW_ROWS   reading the weight is the cost: 4 or 8 bits an element, unpacked in registers
    more               arithmetic is the cost: bfloat16 matrix units (AMX) where the CPU has them

A weight is packed only if its checkpoint holds it in blocks of that few bits, so packing rounds scales to bfloat16
and takes nothing else away. Activations stay float32 outside the products.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

FEW_ROWS = 4
GROUP = 32
MISFIT = 0.1  # of a step: more than rounding to bfloat16 moves a value
INT4_KINDS = frozenset({"Q4_0", "Q4_1"})
INT8_KINDS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """dense bfloat16 [N, K]; `packed` and `scales` as the operator for `bits` wants them."""

    dense: Tensor
    packed: Tensor
    scales: Tensor
    bits: int


Weight: TypeAlias = Tensor | PackedWeight


def pack(weight: Tensor, kinds: Set[str]) -> Weight:
    """The packed form of a bfloat16 weight [N, K] whose parts were stored as `kinds`; itself where none fits."""
    if weight.dtype != torch.bfloat16 or not kinds:
        return weight
    if kinds <= INT4_KINDS and weight.shape[1] % GROUP == 0 and weight.shape[0] % 16 == 0:
        return PackedWeight(weight, *pack_int4(weight), 4)
    if kinds <= INT8_KINDS:
        return PackedWeight(weight, *pack_int8(weight), 8)
    return weight


def pack_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed, scales and zeros bfloat16 [K / 32, N, 2]): groups of 32 along K, w = (q - 8) scale + zero.

    A block of 4-bit source values has at most 16 evenly spaced levels: its least and greatest value give the step,
    unless fewer levels lie between them; then the finest step that puts every value on a level is looked for.
    """
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp(min=1e-8)
    odd = _misfit(groups, low, step)[..., 0] > MISFIT
    step[odd] = _step_of(groups[odd], low[odd], step[odd], high[odd])
    levels = ((groups - low) / step).round().clamp(0, 15)
    packed = torch._convert_weight_to_int4pack_for_cpu(levels.view(weight.shape).to(torch.int32), 1)
    scales = torch.cat([step, low + 8 * step], dim=-1).transpose(0, 1).contiguous()
    return packed, scales.to(torch.bfloat16)


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [N, K], scales bfloat16 [N]): symmetric, a scale a row."""
    wide = weight.float()
    scales = (wide.abs().amax(-1) / 127).clamp(min=1e-12).to(torch.bfloat16)
    levels = (wide / scales.float()[:, None]).round().clamp(-127, 127)
    return levels.to(torch.int8), scales


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, N] in x's dtype; see Backend.linear."""
    if isinstance(weight, Tensor):
        if weight.dtype == x.dtype:
            return functional.linear(x, weight, bias)
        return functional.linear(x.to(weight.dtype), weight, bias).to(x.dtype)
    narrow = x.to(torch.bfloat16)
    if x.shape[0] > FEW_ROWS:
        return functional.linear(narrow, weight.dense, bias).to(x.dtype)
    if weight.bits == 4:
        product = torch._weight_int4pack_mm_for_cpu(narrow, weight.packed, GROUP, weight.scales)
    else:
        product = torch._weight_int8pack_mm(narrow, weight.packed, weight.scales)
    product = product.to(x.dtype)
    return product if bias is None else product.add_(bias)


def _step_of(groups: Tensor, low: Tensor, step: Tensor, high: Tensor) -> Tensor:
    """The step [n, 1] for groups [n, 32] whose values leave the outer levels unused."""
    best = _misfit(groups, low, step)
    for num_steps in range(14, 4, -1):
        wider = ((high - low) / num_steps).clamp(min=1e-8)
        misfit = _misfit(groups, low, wider)
        better = misfit < 0.5 * best
        step, best = torch.where(better, wider, step), torch.where(better, misfit, best)
    return step


def _misfit(groups: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """How far a group's worst value lies from a level, in steps."""
    at = (groups - low) / step
    return (at - at.round()).abs().amax(-1, keepdim=True)
