"""Which tile shapes the attention kernels run with: one table per kernel, measured on an H200. No kernel here.

What was measured (bf16, 32 query heads on 8 KV heads, head size 128) and what it decided:

    decode   64-key tiles, 4 warps, 3 stages. Block ids carried one tile ahead while at most 3 programs share a
             multiprocessor; beyond that one buffer (38 KB) lets more fit, which is worth 10 to 15 %.
             Never split a row where rows x KV heads fill the machine: 35 us against 43 to 47 at 32 rows of 1k.
    prefill  128 x 64 tiles, 8 warps. At head size 128 two stages and at most 128 registers (two programs a
             multiprocessor) beat three stages; at 64 two programs fit anyway.

Over an fp8 pool: the same tiles. Numbers are widened in registers, and V is taken in twos (triton_decode). At 64 rows
of 4k, at most 128 registers are worth 3 %, while a tile of 128 keys or one buffer cost 3 and 13 %. Prefill's tiles
there were chosen by what compiles without spilling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steelyard.kernels.triton_common import power_of_two

MULTIPROCESSORS = 132
BUSY_PROGRAMS = 256
"""Decode programs that keep the memory of an H200 busy; rows are split until there are about so many."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is fixed for a model and a server: heads, blocks, the largest step, and the windows of its KV groups.

    windows  one entry per KV group (None: full attention); equal entries share a table
    dtype    of q, k, v
    keep_first  positions seen behind every window too (AttnSpec)
    is_fp8   the pool is fp8 (kv_fp8.py); else of `dtype` too
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_rows: int
    max_tokens: int
    windows: tuple[int | None, ...] = (None,)
    dtype: torch.dtype = torch.bfloat16
    is_fp8: bool = False
    keep_first: int = 0
    target_programs: int = BUSY_PROGRAMS

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """The head size as a power of two; columns past the head size are zero."""
        return power_of_two(self.head_dim)


def register_cap(config: DecodeConfig | PrefillConfig) -> dict[str, int]:
    """The launch option that caps registers, absent where there is no cap."""
    return {"maxnreg": config.max_registers} if config.max_registers else {}


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """tile keys; stages of the pipeline; carry and merge_last as in triton_decode."""

    tile: int
    warps: int
    stages: int
    carry: bool
    merge_last: bool
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """rows x tile: packed query rows and keys of one step; max_registers None: as many as the compiler likes."""

    rows: int
    tile: int
    warps: int
    stages: int
    tma: bool
    max_registers: int | None = None

    def tokens(self, group: int) -> int:
        """Tokens of one tile of work."""
        return self.rows // group


def decode_config(shape: AttentionShape, rows: int) -> DecodeConfig:
    """The decode kernel for a step of `rows` rows."""
    programs = rows * shape.num_kv_heads
    merge_last = programs >= shape.target_programs
    if shape.dtype == torch.float32:
        return DecodeConfig(tile=32, warps=4, stages=2, carry=True, merge_last=merge_last)
    crowded = 3 * MULTIPROCESSORS < programs <= 5 * MULTIPROCESSORS and shape.block_size >= 64
    if shape.is_fp8:
        tile = 32 if shape.padded_dim == 256 else 64
        if crowded and shape.padded_dim < 256:  # at most 128 registers: four programs share a multiprocessor
            return DecodeConfig(tile, warps=4, stages=3, carry=True, merge_last=merge_last, max_registers=128)
        return DecodeConfig(tile, warps=4, stages=4, carry=True, merge_last=merge_last)
    if shape.padded_dim == 256:
        return DecodeConfig(tile=32, warps=4, stages=3, carry=True, merge_last=merge_last)
    if crowded:
        return DecodeConfig(tile=64, warps=4, stages=3, carry=False, merge_last=merge_last)
    return DecodeConfig(tile=64, warps=4, stages=3, carry=True, merge_last=merge_last)


def prefill_config(shape: AttentionShape) -> PrefillConfig:
    """The plain Triton prefill kernel; a block must hold whole key tiles for TMA loads."""
    if shape.dtype == torch.float32:
        return PrefillConfig(rows=64, tile=16 if shape.is_fp8 else 32, warps=8, stages=2, tma=False)
    tma = shape.block_size >= 64
    if shape.padded_dim == 64:
        return PrefillConfig(rows=128, tile=64, warps=8, stages=3, tma=tma)
    if shape.padded_dim == 256:
        return PrefillConfig(rows=128, tile=16 if shape.is_fp8 else 32, warps=8, stages=2, tma=tma)
    if tma and shape.is_fp8:
        return PrefillConfig(rows=128, tile=64, warps=8, stages=2, tma=True)
    if tma:
        return PrefillConfig(rows=128, tile=64, warps=8, stages=2, tma=True, max_registers=128)
    return PrefillConfig(rows=128, tile=64, warps=8, stages=3, tma=False)
