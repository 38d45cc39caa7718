"""The Triton attention backend: what is launched for a step, and with which shapes. No kernel here.

    prepare    plan_decode, plan_prefill      once a step: the tables, on the device
    forward    kv_write                       unless a fused kernel has written K and V
               decode_split [decode_merge]    rows with one new token
               prefill (Gluon or Triton)      the others

Nothing is allocated after construction but results that the caller asked for (lse). Host integers of a batch choose
which kernels run; everything else is read on the device, so a captured step serves every batch of its bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from steelyard.errors import StartError
from steelyard.kernels import gluon_prefill
from steelyard.kernels.attention import AttnSpec, Batch, KvLayer
from steelyard.kernels.gpu import Gpu, gpu_of
from steelyard.kernels.kv_fp8 import FP8
from steelyard.kernels.select import TRITON_BLOCK_SIZES, TRITON_HEAD_DIMS
from steelyard.kernels.triton_common import NO_WINDOW, early, power_of_two
from steelyard.kernels.triton_configs import (
    AttentionShape,
    PrefillConfig,
    decode_config,
    prefill_config,
    register_cap,
)
from steelyard.kernels.triton_decode import decode_merge, decode_split
from steelyard.kernels.triton_plan import (
    COUNT_FIELDS,
    ENTRIES,
    ITEM_FIELDS,
    ROW_FIELDS,
    TILE_FIELDS,
    most_items,
    plan_decode,
    plan_prefill,
)
from steelyard.kernels.triton_prefill import prefill
from steelyard.kernels.triton_rope_kv import scales_or, write_kv


@dataclass(frozen=True, slots=True)
class Pool:
    """A layer's K and V as kernels address them: tensors, or TMA descriptors over D-wide rows."""

    k: Tensor | TensorDescriptor
    v: Tensor | TensorDescriptor
    block_stride: int


class TritonAttention:
    """Implements kernels.attention.Attention on CUDA (and, for tests, in Triton's interpreter).

    One object per model: its tables are overwritten by each `prepare`, in stream order. `use_gluon` False keeps to
    plain Triton; `pdl` starts the kernels of small steps early (see triton_common for the rules this puts on the
    kernels around); with many rows it would only spread programs unevenly. `gpu`: what they are for, if not `device`.
    """

    name = "triton"

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        *,
        use_gluon: bool = True,
        pdl: bool = False,
        gpu: Gpu | None = None,
    ) -> None:
        _check(shape)
        self.shape = shape
        self._pdl = pdl
        self._gluon = use_gluon and gluon_prefill.supports(shape, gpu or gpu_of(device))
        self._prefill = prefill_config(shape)
        # Inline assembly, which the interpreter has not; there V is read as it is.
        self._paired = shape.is_fp8 and shape.dtype.itemsize == 2 and device.type != "cpu"
        self._windows = tuple(dict.fromkeys(shape.windows))
        self._spread = -(-shape.target_programs // shape.num_kv_heads)
        self._pools: dict[tuple[int, int, str], Pool] = {}
        self._allocate(device)

    @property
    def prefill_kernel(self) -> str:
        """Which kernel computes prompts, with the reason where a pool's kind keeps the Hopper one out."""
        of_pool = {"fp8": self.shape.is_fp8, "bounded": self.shape.keep_first > 0}
        kinds = [name for name, holds in of_pool.items() if holds]
        if self._gluon:
            return "gluon"
        return f"triton, since the KV cache is {' and '.join(kinds)}" if kinds else "triton"

    def _allocate(self, device: torch.device) -> None:
        shape = self.shape
        num_windows, items = len(self._windows), self._num_items(shape.max_rows)

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._items = ints(num_windows * items * ITEM_FIELDS)
        self._rows = ints(num_windows * shape.max_rows * ROW_FIELDS)
        tiles = shape.max_tokens // self._prefill.tokens(shape.group) + shape.max_rows + 1
        self._tiles = ints(tiles * TILE_FIELDS)
        self._counts = ints((num_windows + 1) * COUNT_FIELDS)
        self._tile_count = self._counts[num_windows * COUNT_FIELDS :]
        self._window_lens = torch.tensor([w or NO_WINDOW for w in self._windows], dtype=torch.int32, device=device)
        self._part_out = torch.zeros(items, shape.num_heads, shape.head_dim, dtype=torch.float32, device=device)
        self._part_lse = torch.zeros(items, shape.num_heads, dtype=torch.float32, device=device)
        self._done = ints(shape.max_rows * shape.num_kv_heads)

    def prepare(self, batch: Batch) -> None:
        """See Attention.prepare. The next kernel of the stream must not start early (triton_common)."""
        shape = self.shape
        rows = batch.ctx_len.shape[0]
        assert rows <= shape.max_rows and batch.positions.shape[0] <= shape.max_tokens
        rb = power_of_two(max(shape.max_rows, 16))
        if batch.num_decode > 0:
            items = self._num_items(rows)
            plan_decode[(-(-items // ENTRIES), len(self._windows))](
                self._items, self._rows, self._counts, self._window_lens, batch.q_start, batch.ctx_len, rows, items,
                self._spread, RB=rb, TILE=decode_config(shape, rows).tile, BLOCK=ENTRIES,
                KEEP=shape.keep_first, num_warps=8,
            )  # fmt: skip
        if batch.num_decode < rows:
            plan_prefill[(-(-self._num_tiles(batch) // ENTRIES),)](
                self._tiles, self._tile_count, batch.q_start, batch.ctx_len, rows,
                2 if batch.num_decode > 0 else 1, RB=rb, TOKENS=self._prefill.tokens(shape.group), BLOCK=ENTRIES,
                num_warps=8,
            )  # fmt: skip

    def _num_items(self, rows: int) -> int:
        return most_items(rows, self._spread)

    def _num_tiles(self, batch: Batch) -> int:
        """Tiles that the bucket's tokens and rows can make at most."""
        tokens, rows = batch.positions.shape[0], batch.ctx_len.shape[0]
        return tokens // self._prefill.tokens(self.shape.group) + min(rows, tokens)

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KvLayer, batch: Batch, spec: AttnSpec, out: Tensor
    ) -> Tensor | None:
        """See Attention.forward."""
        self._check_call(q, kv, spec, out)
        if k is not None and v is not None:
            write_kv(k, v, kv, batch.slots[spec.group], self._pdl)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if spec.want_lse else None
        if batch.num_decode > 0:
            self._decode(q, kv, batch, spec, out, lse)
        if batch.num_decode < batch.ctx_len.shape[0]:
            self._prefill_rows(q, kv, batch, spec, out, lse)
        return lse

    def _decode(self, q: Tensor, kv: KvLayer, batch: Batch, spec: AttnSpec, out: Tensor, lse: Tensor | None) -> None:
        shape, rows = self.shape, batch.ctx_len.shape[0]
        config = decode_config(shape, rows)
        which, items = self._windows.index(spec.window), self._num_items(rows)
        table, merge_last = batch.tables[spec.group], config.merge_last
        pdl = self._pdl and not merge_last
        common = self._heads(lse, pdl)
        decode_split[(shape.num_kv_heads, items)](
            q, kv.k, kv.v.view(torch.int16) if self._paired else kv.v, *scales_or(kv, q), out,
            out if lse is None else lse, self._part_out, self._part_lse, self._done,
            q if spec.sinks is None else spec.sinks, table, self._items[which * items * ITEM_FIELDS :],
            self._counts[which * COUNT_FIELDS :], spec.scale, spec.softcap or 1.0, q.stride(0), out.stride(0),
            table.stride(0), kv.k.stride(0), **common, GP=max(16, power_of_two(shape.group)),
            GB=power_of_two(shape.group),
            BN=config.tile, BLOCK=kv.block_size, CARRY=config.carry, STAGES=config.stages, WINDOW=spec.window or 0,
            SOFTCAP=spec.softcap is not None, SINKS=spec.sinks is not None, MERGE_LAST=merge_last, PB=8,
            SCALED=shape.is_fp8, PAIRED=self._paired, KEEP=shape.keep_first if spec.window else 0,
            num_warps=config.warps, **register_cap(config), **early(pdl),
        )  # fmt: skip
        if not merge_last:
            decode_merge[(rows, shape.num_heads)](
                out, out if lse is None else lse, self._part_out, self._part_lse,
                self._rows[which * rows * ROW_FIELDS :], out.stride(0), **common, PB=16, num_warps=4,
                **early(pdl),
            )  # fmt: skip

    def _heads(self, lse: Tensor | None, pdl: bool) -> dict[str, int]:
        shape = self.shape
        heads = {"H": shape.num_heads, "HK": shape.num_kv_heads, "D": shape.head_dim, "DP": shape.padded_dim}
        return {**heads, "WANT_LSE": lse is not None, "PDL": pdl}

    def _prefill_rows(
        self, q: Tensor, kv: KvLayer, batch: Batch, spec: AttnSpec, out: Tensor, lse: Tensor | None
    ) -> None:
        shape, config = self.shape, self._prefill
        count, table = self._tile_count, batch.tables[spec.group]
        if self._gluon and spec.causal:
            work = gluon_prefill.Work(self._tiles, count, self._num_tiles(batch))
            gluon_prefill.launch(shape, q, kv, table, work, spec, out, lse)
            return
        pool = self._pool(kv, config)
        prefill[(shape.num_kv_heads, self._num_tiles(batch))](
            q, pool.k, pool.v, *scales_or(kv, q), out, out if lse is None else lse,
            q if spec.sinks is None else spec.sinks, table, self._tiles, count, batch.ctx_len,
            spec.scale, spec.softcap or 1.0, q.stride(0), out.stride(0), table.stride(0), pool.block_stride,
            H=shape.num_heads, HK=shape.num_kv_heads, D=shape.head_dim,
            DP=shape.padded_dim, BM=config.rows, BN=config.tile, BLOCK=kv.block_size, STAGES=config.stages,
            TMA=config.tma, CAUSAL=spec.causal, WINDOW=spec.window or 0, SOFTCAP=spec.softcap is not None,
            SINKS=spec.sinks is not None, WANT_LSE=lse is not None, SCALED=shape.is_fp8,
            KEEP=shape.keep_first if spec.window else 0, PDL=self._pdl,
            num_warps=config.warps,
            **register_cap(config), **early(self._pdl),
        )  # fmt: skip

    def _pool(self, kv: KvLayer, config: PrefillConfig) -> Pool:
        """The layer's pool as `prefill` takes it; descriptors are made once for each layer."""
        if not config.tma:
            return Pool(kv.k, kv.v, kv.k.stride(0))
        key = (kv.k.data_ptr(), kv.v.data_ptr(), str(kv.k.device))
        if key not in self._pools:
            k, v = (row_descriptor(t, [config.tile, self.shape.padded_dim]) for t in (kv.k, kv.v))
            self._pools[key] = Pool(k, v, kv.k.stride(0) // self.shape.head_dim)
        return self._pools[key]

    def _check_call(self, q: Tensor, kv: KvLayer, spec: AttnSpec, out: Tensor) -> None:
        shape = self.shape
        assert spec.window in self._windows, f"window {spec.window} was not announced: {self._windows}"
        assert kv.block_size == shape.block_size and (spec.window is None or spec.keep_first == shape.keep_first)
        assert (kv.k.dtype == FP8) == (kv.k_scale is not None) == (kv.v_scale is not None) == shape.is_fp8
        assert q.shape[1:] == (shape.num_heads, shape.head_dim) and q.stride()[1:] == (shape.head_dim, 1)
        assert out.shape == q.shape and out.stride()[1:] == (shape.head_dim, 1)
        assert kv.k.shape[1:] == (shape.num_kv_heads, shape.block_size, shape.head_dim)
        inner = (shape.block_size * shape.head_dim, shape.head_dim, 1)
        assert kv.k.stride() == kv.v.stride() and kv.k.stride()[1:] == inner and kv.k.stride(0) % shape.head_dim == 0


def row_descriptor(pool: Tensor, block: list[int]) -> TensorDescriptor:
    """A TMA descriptor over a [blocks, Hkv, B, D] view as a matrix of D-wide rows, block stride and all."""
    dim = pool.shape[-1]
    rows = (pool.shape[0] - 1) * (pool.stride(0) // dim) + pool.shape[1] * pool.shape[2]
    assert rows < 2**31, "a TMA coordinate is int32"
    return TensorDescriptor(pool, shape=[rows, dim], strides=[dim, 1], block_shape=block)


def _check(shape: AttentionShape) -> None:
    if shape.head_dim not in TRITON_HEAD_DIMS:
        raise StartError(
            f"head_dim {shape.head_dim}: the triton attention backend has {', '.join(map(str, TRITON_HEAD_DIMS))}; "
            "use --attention-backend auto"
        )
    if shape.block_size not in TRITON_BLOCK_SIZES:
        raise StartError(
            f"block_size {shape.block_size}: the triton attention backend takes "
            f"{', '.join(map(str, TRITON_BLOCK_SIZES))}; set --block-size to one of them"
        )
    if shape.num_heads % shape.num_kv_heads:
        raise StartError(f"{shape.num_heads} query heads do not divide into {shape.num_kv_heads} KV heads")
