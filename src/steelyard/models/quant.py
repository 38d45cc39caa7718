"""GGUF block formats to float32, in torch, on packed blocks: bit for bit what the gguf library computes.

A row of a quantised tensor is a run of blocks; a block is some float16 scales and packed integers.

    Q4_0   d:f16  32 x 4 bit                 (q - 8) d
    Q4_1   d:f16 m:f16  32 x 4 bit           q d + m
    Q5_0   d:f16  32 high bits  32 x 4 bit   (q - 16) d
    Q5_1   d:f16 m:f16  32 high bits  32 x 4 bit
    Q8_0   d:f16  32 x int8                  q d
    Q2_K .. Q6_K   256 weights, 16 (8) sub-blocks with scales of their own
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`block_len` weights in `block_bytes` bytes; `unpack` maps uint8 [n, block_bytes] to float32 [n, block_len]."""

    block_len: int
    block_bytes: int
    unpack: Callable[[Tensor], Tensor]


def dequantize(packed: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """uint8 bytes of a tensor of `kind` -> float32 `shape`."""
    block = FORMATS[kind]
    return block.unpack(packed.view(-1, block.block_bytes)).view(shape)


def levels(packed: Tensor, kind: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor of a kind in LEVELS, not multiplied out: (levels uint8 [N, K], step and low float32 [N, K / 32]).

    Its values are level * step + low in groups of 32.
    """
    blocks = packed.view(-1, FORMATS[kind].block_bytes)
    quants, step, low = LEVELS[kind].read(blocks)
    return quants.view(shape), step.view(shape[0], -1), low.view(shape[0], -1)


def _halves(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """float16 numbers at byte `first` of every block, as float32 [n, count]."""
    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [n, k] -> [n, 2 k]: all low nibbles, then all high ones."""
    num_bytes = packed.shape[1]
    found = packed.new_empty(packed.shape[0], 2 * num_bytes)
    torch.bitwise_and(packed, 15, out=found[:, :num_bytes])
    torch.bitwise_right_shift(packed, 4, out=found[:, num_bytes:])
    return found


def _high_bits(blocks: Tensor, first: int) -> Tensor:
    """32 bits at byte `first` -> uint8 [n, 32] of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = (blocks[:, first : first + 4, None] >> shifts) & 1
    return bits.reshape(-1, 32) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    levels = (_nibbles(blocks[:, 6:]) | _high_bits(blocks, 2)).to(torch.int8) - 16
    return _halves(blocks, 0) * levels.float()


def _q5_1(blocks: Tensor) -> Tensor:
    levels = _nibbles(blocks[:, 8:]) | _high_bits(blocks, 4)
    return _halves(blocks, 0) * levels.float() + _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks, 0))


def _bit_pairs(packed: Tensor) -> Tensor:
    """uint8 [n, 64] -> [n, 256]: of each 32 bytes first all lowest bit pairs, then the next, ..."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).view(1, 1, 4, 1)
    return ((packed.view(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 256)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    d, dmin = _halves(blocks, 80), _halves(blocks, 82)
    steps, lows = d * (scales & 15).float(), dmin * (scales >> 4).float()
    levels = _bit_pairs(blocks[:, 16:80]).view(-1, 16, 16).float()
    return (steps[..., None] * levels - lows[..., None]).view(-1, 256)


def _q3_k(blocks: Tensor) -> Tensor:
    masks, packed, raw = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low = torch.cat([raw[:, :8] & 15, raw[:, :8] >> 4], dim=-1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 4, 1)
    high = ((raw[:, None, 8:12] >> shifts) & 3).reshape(-1, 16)
    scales = (low | (high << 4)).to(torch.int8) - 32
    steps = _halves(blocks, 108) * scales.float()
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    absent = ((masks[:, None, :] >> bits) & 1) ^ 1  # a clear bit takes four away
    levels = _bit_pairs(packed).to(torch.int8) - (absent.reshape(-1, 256) << 2).to(torch.int8)
    return (steps[..., None] * levels.view(-1, 16, 16).float()).view(-1, 256)


def _six_bit_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 minima of 6 bits (Q4_K, Q5_K)."""
    d, m, both = raw[:, :4], raw[:, 4:8], raw[:, 8:12]
    scales = torch.cat([d & 63, (both & 15) | ((d >> 2) & 48)], dim=-1)
    lows = torch.cat([m & 63, (both >> 4) | ((m >> 2) & 48)], dim=-1)
    return scales, lows


def _pairs_of_32(packed: Tensor) -> Tensor:
    """uint8 [n, 128] -> [n, 8, 32]: of each 32 bytes the low nibbles, then the high ones."""
    halves = packed.view(-1, 4, 1, 32)
    return torch.cat([halves & 15, halves >> 4], dim=2).reshape(-1, 8, 32)


def _k_steps(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Step and offset of each of a block's 8 groups; a weight is level * step - offset."""
    scales, lows = _six_bit_scales(blocks[:, 4:16])
    return _halves(blocks, 0) * scales.float(), _halves(blocks, 2) * lows.float()


def _k_blocks(blocks: Tensor, quants: Tensor) -> Tensor:
    steps, offsets = _k_steps(blocks)
    return (steps[..., None] * quants.float() - offsets[..., None]).view(-1, 256)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_blocks(blocks, _pairs_of_32(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = (blocks[:, None, 16:48] >> bits) & 1
    return _k_blocks(blocks, _pairs_of_32(blocks[:, 48:]) | (high << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, :128], blocks[:, 128:192]
    steps = _halves(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    nibbles = low.view(-1, 2, 1, 64)
    nibbles = torch.cat([nibbles & 15, nibbles >> 4], dim=2).reshape(-1, 256)
    levels = (nibbles | (_bit_pairs(high) << 4)).to(torch.int8) - 32
    return (steps[..., None] * levels.view(-1, 16, 16).float()).view(-1, 256)


FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}


def _levels_of_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    step = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), step, -8 * step


def _levels_of_q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _levels_of_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    steps, offsets = _k_steps(blocks)
    return _pairs_of_32(blocks[:, 16:]), steps, -offsets


def _levels_of_q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    step = _halves(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _high_bits(blocks, 2), step, -16 * step


def _levels_of_q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(blocks[:, 8:]) | _high_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2)


def _levels_of_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    step = _halves(blocks, 0)
    return blocks[:, 2:] ^ 128, step, -128 * step  # a two's complement byte with its sign bit turned is q + 128


@dataclass(frozen=True, slots=True)
class LevelFormat:
    """Bits of a level, and uint8 [n, block_bytes] -> (levels, step, low) of the blocks' groups of 32."""

    bits: int
    read: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


LEVELS: dict[str, LevelFormat] = {
    "Q4_0": LevelFormat(4, _levels_of_q4_0),
    "Q4_1": LevelFormat(4, _levels_of_q4_1),
    "Q4_K": LevelFormat(4, _levels_of_q4_k),
    "Q5_0": LevelFormat(5, _levels_of_q5_0),
    "Q5_1": LevelFormat(5, _levels_of_q5_1),
    "Q8_0": LevelFormat(8, _levels_of_q8_0),
}
