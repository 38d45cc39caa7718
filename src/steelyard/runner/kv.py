"""The KV pool: allocation, views per layer, copies of blocks, and how large it may be.

    group pool   [blocks + 1, layers, 2, Hkv, block_size, D]     block-major: a block is one run of memory
    layer view   pool[:, layer, 0] and pool[:, layer, 1]         [blocks + 1, Hkv, block_size, D]

Block 0 is the null block. The pool is zeroed once: positions behind a row's end are read before they are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steelyard.core.step import Copy, Swap
from steelyard.errors import StartError
from steelyard.kernels.attention import KvLayer
from steelyard.kernels.kv_fp8 import FP8, as_bytes
from steelyard.models.config import DecoderConfig
from steelyard.plan.memory import KvPools, MemoryBudget
from steelyard.plan.shape import ModelShape
from steelyard.runner.host import HostPool, slots_in
from steelyard.runner.options import Limits, RunnerOptions
from steelyard.runner.staging import Staging


class KvPool:
    """One pool a KV group; `layers[i]` are decoder layer i's views."""

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: Sequence[int],
        block_size: int,
        pool: torch.Tensor,
        scales: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """`pool`: an empty tensor whose dtype and device the pools take. `scales`: of each layer, for an fp8 pool.

        `pools` hold bytes where numbers are fp8, which torch moves and zeroes in no other form.
        """
        assert (pool.dtype == FP8) == (scales is not None), "an fp8 pool has scales, another has none"
        self.block_size = block_size
        self.pools: list[Tensor] = []
        views: dict[int, KvLayer] = {}
        for group, window in enumerate(config.windows):
            members = [i for i, layer in enumerate(config.layers) if layer.window == window]
            first = config.layers[members[0]]
            shape = (num_blocks[group] + 1, len(members), 2, first.num_kv_heads, block_size, first.head_dim)
            blocks = _zeros(shape, pool)
            self.pools.append(as_bytes(blocks))
            for at, layer in enumerate(members):
                of_layer = (None, None) if scales is None else scales[layer]
                views[layer] = KvLayer(blocks[:, at, 0], blocks[:, at, 1], block_size, *of_layer)
        self.host: HostPool | None = None
        self.layers = tuple(views[i] for i in range(len(config.layers)))

    def stage(self, copies: Sequence[Copy], staging: Staging) -> None:
        """Put a plan's copies into the step's upload."""
        for group in range(len(self.pools)):
            some = [c for c in copies if c.group == group]
            if some:
                staging.add(f"copy_src{group}", np.array([c.src_block for c in some], np.int32))
                staging.add(f"copy_dst{group}", np.array([c.dst_block for c in some], np.int32))

    def copy(self, staging: Staging) -> None:
        """Copy whole blocks, all layers of their group; every source is read before any destination is written."""
        for group, pool in enumerate(self.pools):
            if f"copy_src{group}" in staging:
                blocks = pool.index_select(0, staging[f"copy_src{group}"])
                pool.index_copy_(0, staging[f"copy_dst{group}"].long(), blocks)

    def add_host(self, space_bytes: int) -> None:
        """A host tier of at most so many bytes behind the pools; 0: none. Raises StartError where it holds nothing."""
        if space_bytes:
            self.host = HostPool(self.pools, slots_in(space_bytes, self.pools))

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Usable blocks of each group: all but the null block."""
        return tuple(pool.shape[0] - 1 for pool in self.pools)

    @property
    def num_host_blocks(self) -> tuple[int, ...]:
        """Slots of each group's host tier; empty where there is none."""
        return () if self.host is None else self.host.num_slots

    def swap(self, swaps: Sequence[Swap]) -> None:
        """Make a plan's moves between device and host; what is launched after it finds them done."""
        if swaps:
            assert self.host is not None, "this runner has no host tier"
            self.host.swap(swaps)

    def clear(self, group: int, blocks: Tensor) -> None:
        """Zero whole blocks that a row is about to begin.

        Slots not written yet are read and then masked; what a former owner left there (NaN, if it failed) would
        survive the mask.
        """
        self.pools[group].index_fill_(0, blocks, 0)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of `like`'s dtype and device. On a CPU the pages are the system's own zeros, taken when first touched."""
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=as_bytes(like).dtype, device=like.device).view(like.dtype)
    lazy = np.zeros(math.prod(shape) * like.element_size(), np.uint8)
    return torch.from_numpy(lazy).view(like.dtype).view(shape)


def kv_layout(computed: torch.dtype, held: torch.dtype, block_size: int, config: DecoderConfig) -> str:
    """What KV of equal tokens must have in common to be the same: the dtypes, what was seen, the tokens of a block."""
    names = [str(dtype).removeprefix("torch.") for dtype in (computed, held)]
    first = config.layers[0]
    is_bounded = first.window is not None and len(config.windows) == 1
    bounded = f"window {first.window} after {first.keep_first}/" if is_bounded else ""
    return f"{names[0]}/{'fp8/hadamard' if held == FP8 else names[1]}/{bounded}{block_size}"


LEAST_TOKENS = 128
"""A pool sized by memory holds so many, a whole context, or all that its rows can use: a server that could answer
nobody is not started.
"""


def size_pool(
    shape: ModelShape, options: RunnerOptions, limits: Limits, budget: MemoryBudget, dtype_bytes: int
) -> tuple[int, ...]:
    """Usable blocks of each group: as told, else what a given number of bytes holds, else what `budget` leaves.

    Never more than max_rows sequences of max_model_len can use. Raises StartError with the numbers if nothing fits.
    """
    pools = _pools(shape, options, limits, dtype_bytes)
    if options.num_gpu_blocks_override is not None:
        return pools.blocks_at(options.num_gpu_blocks_override)
    available = options.kv_cache_memory_bytes
    if available is None:
        budget.check()
        available = budget.kv_bytes
    most = max(limits.max_rows * max(pools.ratio), *pools.least, 0)
    scale = min(pools.fit(available), most)
    least = min(-(-min(LEAST_TOKENS, limits.max_model_len) // limits.block_size), most)
    if scale < least:
        raise StartError(
            f"{available:,} bytes are left for the KV cache, which are {scale * limits.block_size} tokens; the least "
            f"to serve with is {least * limits.block_size}, in {pools.bytes_at(least):,} bytes. Give more memory "
            "(--kv-cache-memory-bytes, --gpu-memory-utilization), or say how little it is to be with "
            "--num-gpu-blocks-override",
            param="kv_cache_memory_bytes",
        )
    return pools.blocks_at(scale)


def _pools(shape: ModelShape, options: RunnerOptions, limits: Limits, dtype_bytes: int) -> KvPools:
    """In what proportion groups grow. Where nothing is given back before all of it was there, a window saves less:

    a prompt in one step   every group holds one whole context before any holds more
    a reserved run         every group holds whole contexts
    """
    pools = KvPools.of(shape, limits.block_size, dtype_bytes, expected_len=limits.max_model_len)
    whole = (-(-limits.max_model_len // limits.block_size),) * len(pools.ratio)
    if options.kv_allocation != "paged":
        return replace(pools, ratio=whole)
    return replace(pools, least=whole) if options.whole_prompts else pools


def available_bytes(device: torch.device) -> int:
    """Bytes that can be had on the device now; on a CPU, within the container's limit where there is one."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [n for n in (_meminfo_available(), _cgroup_available()) if n is not None]
    return min(free) if free else 4 * 2**30


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_available() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (root / "memory.max").read_text(), (root / "memory.current").read_text()
    except OSError:
        return None
    return None if limit.strip() == "max" else max(int(limit) - int(used), 0)
