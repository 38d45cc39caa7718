"""Linear layers on a CPU in two forms of each weight: packed int4 or int8 for few rows, bfloat16 for many.

    rows <= FEW_ROWS   reading the weight is the cost: 4 or 8 bits an element, unpacked in registers
    more               arithmetic is the cost: bfloat16 matrix units (AMX) where the CPU has them, the weight laid out
                       once as they read it (otherwise every product begins by doing that)

A weight is packed only if its checkpoint holds it in blocks of that few bits, from the stored levels themselves where
they come in groups of 32: scales are rounded to bfloat16 and nothing else is taken away. Levels of more than four bits
are two of four, which lie side by side as the halves of a weight twice as wide; it is given its input twice.

    level = 16 high + low       w x = [16 step * high | step * low] [x | x]

Kinds with other groups (Q6_K) become int8 with one scale a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.kernels.backend import Stored

FEW_ROWS = 4
LAID_OUT_FOR_ROWS = 16
GROUP = 32
CHUNK_ROWS = 512  # so that the passes over a chunk stay in a core's cache
INT8_KINDS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """dense bfloat16 [N, K], plain or laid out for oneDNN; `packed` and `scales` as the operator for `bits` wants them.

    form  what `packed` is: int4, int4x2 (two halves), int8, or none
    """

    dense: Tensor
    packed: Tensor | None = None
    scales: Tensor | None = None
    form: str = "none"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held."""
        return tuple(t for t in (self.dense, self.packed, self.scales) if t is not None)


Weight: TypeAlias = Tensor | PackedWeight


def pack(weight: Tensor, stored: Sequence[Stored]) -> Weight:
    """The forms of a bfloat16 weight [N, K] whose rows were stored so; of another dtype itself."""
    if weight.dtype != torch.bfloat16:
        return weight
    dense = lay_out(weight)
    fits = has_int4() and weight.shape[1] % GROUP == 0 and weight.shape[0] % 16 == 0
    if stored and fits and all(part.levels for part in stored):
        form = "int4" if max(part.bits for part in stored) == 4 else "int4x2"
        return PackedWeight(dense, *pack_int4(stored, halves=form == "int4x2"), form)
    if stored and all(part.kind in INT8_KINDS for part in stored):
        return PackedWeight(dense, *pack_int8(weight), "int8")
    return weight if dense is weight else PackedWeight(dense)


def lay_out(weight: Tensor) -> Tensor:
    """The weight in oneDNN's own layout; itself where this CPU or build of torch has no bfloat16 products of it."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return weight
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LAID_OUT_FOR_ROWS)
    return laid_out


def has_int4() -> bool:
    """Whether this build of torch has the int4 operators (2.6 on)."""
    return hasattr(torch, "_weight_int4pack_mm_for_cpu") and hasattr(torch, "_convert_weight_to_int4pack_for_cpu")


def pack_int4(stored: Sequence[Stored], halves: bool) -> tuple[Tensor, Tensor]:
    """(packed, scales and zeros bfloat16 [K / 32, N, 2]): groups of 32 along K, w = (level - 8) scale + zero.

    halves: levels of up to 8 bits, K is twice as many.
    """
    parts = [_in_halves(part) if halves else _as_stored(part) for part in stored]
    levels, scale, zero = (torch.cat(some) if len(parts) > 1 else some[0] for some in zip(*parts, strict=True))
    packed = [
        torch._convert_weight_to_int4pack_for_cpu(levels[first : first + CHUNK_ROWS].to(torch.int32), 1)
        for first in range(0, levels.shape[0], CHUNK_ROWS)
    ]
    return torch.cat(packed), torch.stack([scale.T, zero.T], dim=-1).to(torch.bfloat16)


def _as_stored(part: Stored) -> tuple[Tensor, Tensor, Tensor]:
    assert part.levels is not None
    levels, step, low = part.levels()
    return levels, step, torch.add(low, step, alpha=8)


def _in_halves(part: Stored) -> tuple[Tensor, Tensor, Tensor]:
    """High halves are moved to the middle of their range: the zero is then as small as the weights are."""
    assert part.levels is not None
    levels, step, low = part.levels()
    middle = 2**part.bits // 32
    high = (levels >> 4) + (8 - middle)
    scale = torch.cat([16 * step, step], dim=1)
    zero = torch.cat([torch.add(low, step, alpha=16 * middle), 8 * step], dim=1)
    return torch.cat([high, levels & 15], dim=1), scale, zero


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [N, K], scales bfloat16 [N]): symmetric, a scale a row."""
    packed = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=torch.bfloat16)
    for first in range(0, weight.shape[0], CHUNK_ROWS):
        wide = weight[first : first + CHUNK_ROWS].float()
        scale = torch.linalg.vector_norm(wide, torch.inf, dim=-1).div_(127).clamp_(min=1e-12).to(torch.bfloat16)
        scales[first : first + CHUNK_ROWS] = scale
        packed[first : first + CHUNK_ROWS] = wide.div_(scale.float()[:, None]).round_().clamp_(-127, 127)
    return packed, scales


def dtype_of(weight: Weight) -> torch.dtype:
    """What products with the weight are computed in."""
    return weight.dtype if isinstance(weight, Tensor) else weight.dense.dtype


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype) by what is called fastest: at one row the call costs more than the copy."""
    if x.dtype is dtype:
        return x
    if dtype is torch.float32:
        return x.float()
    return x.bfloat16() if dtype is torch.bfloat16 else x.to(dtype)


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, N] in x's dtype; see Backend.linear."""
    return cast(product(x, weight, bias), x.dtype)


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, N] in the weight's dtype."""
    narrow = cast(x, dtype_of(weight))
    if isinstance(weight, Tensor):
        return functional.linear(narrow, weight, bias)
    if weight.packed is None or x.size(0) > FEW_ROWS:
        return _dense_product(narrow, weight.dense, bias)
    multiply, rest = operator_for_few(weight)
    found: Tensor = multiply(narrow, *rest)
    return found if bias is None else found.add_(bias)


def operator_for_few(weight: Weight) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """(operator, its arguments after x): the product of up to FEW_ROWS rows in the weight's dtype, without a bias."""
    if isinstance(weight, Tensor):
        return functional.linear, (weight,)
    if weight.packed is None or weight.scales is None:
        return _dense_product, (weight.dense, None)
    if weight.form == "int8":
        return torch._weight_int8pack_mm, (weight.packed, weight.scales)
    multiply = torch._weight_int4pack_mm_for_cpu if weight.form == "int4" else _product_of_halves
    return multiply, (weight.packed, GROUP, weight.scales)


def _product_of_halves(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    return torch._weight_int4pack_mm_for_cpu(torch.cat([x, x], dim=1), packed, group, scales)


def _dense_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found
