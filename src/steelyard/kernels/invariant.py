"""Operators whose result for a token depends on its sequence alone: not on the step's other tokens, nor on chunks.

Floating-point sums depend on their order, and fast operators choose the order by shape. So every shape is fixed here:

    products, norms, gates   16 tokens at a time, the last tile padded with zeros
    draws                    one row at a time
    attention                the queries at positions 16 i .. 16 i + 15 of a row, whichever of them are new, against the
                             keys up to 16 i + 15; what a query must not see has weight zero

A token then meets the same shapes alone, in a crowd, in any chunk, after a prefix hit and after preemption; the same
bits follow as long as an operator repeats itself for equal shapes, which the tests and `steelyard selftest` look at.
Not fast: a decode pays for 16 rows. On a CPU only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from steelyard.kernels import cpu_fused, cpu_linear
from steelyard.kernels.attention import Attention, AttnSpec, Batch, KvLayer
from steelyard.kernels.backend import Fusions, Stored
from steelyard.kernels.cpu import CpuBackend
from steelyard.kernels.reference import write_kv
from steelyard.kernels.sampling import Controls, choose

TILE = 16


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of x [T, ...] in calls of exactly TILE rows: [T, ...]. It must treat rows alike."""
    num_rows = x.shape[0]
    found = []
    for first in range(0, num_rows, TILE):
        tile = x[first : first + TILE]
        if tile.shape[0] < TILE:
            tile = torch.cat([tile, tile.new_zeros(TILE - tile.shape[0], *x.shape[1:])])
        found.append(function(tile.contiguous()))
    return torch.cat(found)[:num_rows]


class InvariantBackend(CpuBackend):
    """The CPU's operators, one at a time, in tiles of one size."""

    name = "invariant"

    def __init__(self) -> None:
        super().__init__()
        self.attention: Attention = InvariantAttention()
        self.fusions: Fusions | None = None

    def pack(self, weight: Tensor, stored: Sequence[Stored]) -> cpu_linear.Weight:
        """The form for many rows alone: the other one would be taken by the number of rows."""
        return cpu_linear.pack(weight, ())

    def linear(self, x: Tensor, weight: cpu_linear.Weight, bias: Tensor | None = None) -> Tensor:
        """See Backend.linear."""
        return in_tiles(lambda tile: cpu_linear.linear(tile, weight, bias), x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend.rms_norm."""
        return in_tiles(lambda tile: cpu_fused.rms_norm(tile, weight, eps, tile.dtype), x)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """See Backend.gated."""
        return in_tiles(lambda tile: cpu_fused.gated(tile, activation), x)

    def choose(self, logits: Tensor, u: Tensor, controls: Controls) -> Tensor:
        """See Backend.choose; row by row, since torch sums a lone row in other pieces than one of several."""
        return torch.cat([choose(logits[at], u[at], _row_of(controls, at)) for at in _each(logits.shape[0])])


def _each(count: int) -> Iterator[slice]:
    return (slice(at, at + 1) for at in range(count))


def _row_of(controls: Controls, at: slice) -> Controls:
    given = ((f.name, getattr(controls, f.name)) for f in fields(Controls))
    return replace(controls, **{name: values[at] for name, values in given if values is not None})


class InvariantAttention:
    """The Attention protocol, a tile of one row's positions after another. Sums are float32 (float64 for float64)."""

    name = "invariant"

    def __init__(self) -> None:
        self._tiles: list[tuple[int, int, int, int]] = []

    def prepare(self, batch: Batch) -> None:
        """Cut the step's new tokens at multiples of TILE: (row, first position, first packed token, count)."""
        self._tiles = []
        starts, lengths = batch.q_start.tolist(), batch.ctx_len.tolist()
        for row, length in enumerate(lengths):
            token, last = starts[row], starts[row + 1]
            while token < last:
                position = length - (last - token)
                count = min(last - token, TILE - position % TILE)
                self._tiles.append((row, position, token, count))
                token += count

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KvLayer, batch: Batch, spec: AttnSpec, out: Tensor
    ) -> Tensor | None:
        """See Attention.forward."""
        assert kv.k_scale is None, "an fp8 pool"
        if k is not None and v is not None:
            write_kv(k, v, kv, batch.slots[spec.group])
        lse = torch.empty(q.shape[:2], dtype=torch.float32) if spec.want_lse else None
        for row, position, token, count in self._tiles:
            first = position // TILE * TILE
            at = slice(position - first, position - first + count)
            queries = q.new_zeros(TILE, *q.shape[1:])
            queries[at] = q[token : token + count]
            known = int(batch.ctx_len[row])
            keys, values, start = _read(kv, batch.tables[spec.group][row], first, known, spec.window)
            found, found_lse = _attend(queries, keys, values, spec, (first, start))
            out[token : token + count] = found[at].to(out.dtype)
            if lse is not None:
                lse[token : token + count] = found_lse[at]
        return lse


def _read(kv: KvLayer, table: Tensor, first: int, known: int, window: int | None) -> tuple[Tensor, Tensor, int]:
    """K and V [keys, Hkv, D] at positions start .. first + TILE - 1, and start: a multiple of TILE no window cuts.

    Positions from `known` on are not there yet: the null block is read for them.
    """
    start = 0 if window is None else max(0, first - window + 1) // TILE * TILE
    at = torch.arange(start, first + TILE)
    block = table[(at // kv.block_size).clamp(max=table.shape[0] - 1)].long()
    block = torch.where(at < known, block, 0)
    offset = at % kv.block_size
    return kv.k[block, :, offset], kv.v[block, :, offset], start


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, places: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """q [TILE, Hq, D], k and v [K, Hkv, D]; places: positions of the first query and key. (out [TILE, Hq, D], lse)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    num_kv_heads = k.shape[1]
    grouped = q.to(wide).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    scores = torch.bmm(grouped, k.to(wide).permute(1, 2, 0)).mul_(spec.scale)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    first, start = places
    query_at = torch.arange(first, first + TILE)[:, None]
    key_at = torch.arange(start, start + k.shape[0])
    visible = key_at <= query_at
    if spec.window is not None:
        visible = visible & (key_at > query_at - spec.window)
    scores = scores.unflatten(1, (-1, TILE)).masked_fill_(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    if spec.sinks is not None:
        lse = torch.logaddexp(lse, spec.sinks.to(wide).view(num_kv_heads, -1, 1))
    weights = scores.sub_(lse[..., None]).exp_().flatten(1, 2)
    found = torch.bmm(weights, v.to(wide).transpose(0, 1)).unflatten(1, (-1, TILE))
    return found.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1)
