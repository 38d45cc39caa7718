"""Writing new keys and values into a paged pool on a CPU: which rows of its memory, worked out once a step."""

from __future__ import annotations

import torch
from torch import Tensor

from steelyard.kernels.attention import KvLayer
from steelyard.kernels.kv_fp8 import as_bytes, to_stored


class KvWriter:
    """Remembers where the tokens of a step go, for all layers that share their slots."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}

    def forget(self) -> None:
        """A new step begins."""
        self._places.clear()

    def write(self, k: Tensor, v: Tensor, kv: KvLayer, slots: Tensor) -> None:
        """k, v [T, Hkv, D] to `slots` int64 [T]: one row copy per (token, head) and pool; slot -1 is left out."""
        _, index, kept = self._place(kv, slots)
        for pool, new, scale in ((kv.k, k, kv.k_scale), (kv.v, v, kv.v_scale)):
            used = new if kept is None else new[kept]
            dim = pool.shape[3]
            stored = to_stored(used, scale, pool.dtype).reshape(-1, dim)
            as_bytes(as_runs(pool, dim)).index_copy_(0, index, as_bytes(stored))

    def _place(self, kv: KvLayer, slots: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(slots, rows of the pool [T * Hkv], tokens that are no padding or None for all)."""
        found = self._places.get(id(slots))
        if found is None:
            kept = None if bool((slots >= 0).all()) else torch.nonzero(slots >= 0)[:, 0]
            used = slots if kept is None else slots[kept]
            block, offset = used // kv.block_size, used % kv.block_size
            head = torch.arange(kv.k.shape[1]) * kv.block_size
            rows_per_block = kv.k.stride(0) // kv.k.shape[3]
            index = (block * rows_per_block + offset)[:, None] + head
            # The slots are kept beside what was made of them, so that their id stays theirs.
            found = self._places[id(slots)] = (slots, index.flatten(), kept)
        return found


def as_runs(pool: Tensor, run_len: int) -> Tensor:
    """The pool's memory from its first element on, as [n, run_len]: what is contiguous within a (block, head)."""
    assert pool.stride()[1:] == (pool.shape[2] * pool.shape[3], pool.shape[3], 1), "a block must be contiguous"
    last = (pool.shape[0] - 1) * pool.stride(0) + pool.shape[1] * pool.stride(1)
    return pool.as_strided((last // run_len, run_len), (run_len, 1), pool.storage_offset())
