"""Keys and values of a paged pool on a CPU: writing new ones, and the pool's memory as rows that are read whole.

Where tokens of a step go is worked out once a step. K and V of a block that lie side by side are one pool of twice as
many heads, written and read in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.attention import KvLayer
from steelyard.kernels.cpu_linear import cast
from steelyard.kernels.kv_fp8 import as_bytes, hadamard, to_stored


@dataclass(frozen=True, slots=True)
class Runs:
    """A layer's memory: K's, then V's, or one for both, which then begins with K.

    tokens  [n, D], a row a (block, head, slot)
    blocks  [n, block_size * D], a row a (block, head)
    kv      whose memory it is, kept so that its id stays its own
    """

    tokens: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...]
    kv: KvLayer


@dataclass(frozen=True, slots=True)
class Places:
    """Rows of Runs.tokens that a step's tokens go to.

    kept    indexes of tokens that are no padding; None: all
    both    int64 [T * 2 Hkv], of one pool for both
    alone   int64 [T * Hkv], of K's or V's own
    slots   what they were made of, kept so that its id stays its own
    """

    kept: Tensor | None
    both: Tensor
    alone: Tensor
    slots: Tensor


class KvWriter:
    """Remembers each layer's memory, and where the tokens of a step go, for all layers that share their slots.

    Both are found by the id of what they were made of and hold it: while an entry lives no other object has its id.
    """

    def __init__(self) -> None:
        self._places: dict[int, Places] = {}
        self._runs: dict[int, Runs] = {}

    def forget(self) -> None:
        """A new step begins."""
        self._places.clear()

    def runs(self, kv: KvLayer) -> Runs:
        """The layer's memory, the same object every step."""
        found = self._runs.get(id(kv))
        if found is None:
            found = self._runs[id(kv)] = _runs(kv)
        return found

    def write(self, new: Tensor, kv: KvLayer, slots: Tensor) -> None:
        """new [T, 2 Hkv, D], each token's K heads, then its V heads, to `slots` int64 [T]; slot -1 is left out.

        One row copy per (token, head), for both at once where they lie side by side.
        """
        runs, places, dim = self.runs(kv), self.places(kv, slots), kv.k.shape[3]
        used = new if places.kept is None else new[places.kept]
        if len(runs.tokens) == 1:
            runs.tokens[0].index_copy_(0, places.both, cast(used.reshape(-1, dim), kv.k.dtype))
            return
        k, v = used.chunk(2, dim=1)
        parts = (k if kv.k_scale is None else hadamard(k), v)
        for rows, part, scale in zip(runs.tokens, parts, (kv.k_scale, kv.v_scale), strict=True):
            stored = to_stored(part, scale, kv.k.dtype).reshape(-1, dim)
            rows.index_copy_(0, places.alone, as_bytes(stored))

    def places(self, kv: KvLayer, slots: Tensor) -> Places:
        """Where the step's tokens go, the same object for all layers that share the slots."""
        found = self._places.get(id(slots))
        if found is None:
            kept = None if bool((slots >= 0).all()) else torch.nonzero(slots >= 0)[:, 0]
            used = slots if kept is None else slots[kept]
            block, offset = used // kv.block_size, used % kv.block_size
            num_heads = kv.k.shape[1]
            head = torch.arange(2 * num_heads) * kv.block_size
            rows_per_block = kv.k.stride(0) // kv.k.shape[3]
            index = (block * rows_per_block + offset)[:, None] + head
            found = Places(kept, index.flatten(), index[:, :num_heads].flatten(), slots)
            self._places[id(slots)] = found
        return found


def _runs(kv: KvLayer) -> Runs:
    k, v, dim = kv.k, kv.v, kv.k.shape[3]
    pools: tuple[Tensor, ...] = (k, v)
    a_block = k.shape[1] * k.stride(1)
    if (
        kv.k_scale is None
        and (k.dtype, k.shape, k.stride()) == (v.dtype, v.shape, v.stride())
        and v.data_ptr() == k.data_ptr() + a_block * k.element_size()
        and k.stride(0) >= 2 * a_block
    ):
        pools = (k.as_strided((k.shape[0], 2 * k.shape[1], *k.shape[2:]), k.stride()),)
    return Runs(
        tuple(as_bytes(_as_runs(pool, dim)) for pool in pools),
        tuple(_as_runs(pool, kv.block_size * dim) for pool in pools),
        kv,
    )


def _as_runs(pool: Tensor, run_len: int) -> Tensor:
    """The pool's memory from its first element on, as [n, run_len]: what is contiguous within a (block, head)."""
    assert pool.stride()[1:] == (pool.shape[2] * pool.shape[3], pool.shape[3], 1), "a block must be contiguous"
    last = (pool.shape[0] - 1) * pool.stride(0) + pool.shape[1] * pool.stride(1)
    return pool.as_strided((last // run_len, run_len), (run_len, 1), pool.storage_offset())
