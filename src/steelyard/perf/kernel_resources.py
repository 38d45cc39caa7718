"""The training kernels compiled for a GPU that need not be here: what each needs, by head size and operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.flash_autograd import FlashSpec, constants, descriptor, scalars, tiles_for
from steelyard.kernels.triton_backward import key_gradient_kernel, query_gradient_kernel
from steelyard.kernels.triton_train import train_forward_kernel
from steelyard.perf.cubin import Resources, resources


@dataclass(frozen=True, slots=True)
class KernelNeed:
    name: str
    head_dim: int
    need: Resources


def training_kernels(head_dim: int, spec: FlashSpec, dtype: torch.dtype = torch.bfloat16) -> list[KernelNeed]:
    """Forward, key gradient and query gradient of `spec`, compiled for the active target (see `cubin.compile_for`).

    16 query heads on 4 KV heads: the grouped form needs the most registers.
    """
    tokens, heads, kv_heads = 4096, 16, 4
    q, k = _absent(tokens, heads, head_dim, dtype=dtype), _absent(tokens, kv_heads, head_dim, dtype=dtype)
    rows, cu = _absent(heads, tokens, dtype=torch.float32), _absent(3, dtype=torch.int32)
    tiles, numbers = tiles_for(head_dim, dtype), scalars(spec, head_dim)
    first, second, third = tiles.forward, tiles.keys, tiles.queries
    back = {"grid": (1,), "ROWS": first.bm}
    compiled = {
        "forward": train_forward_kernel.warmup(
            q, descriptor(k, first.bn), descriptor(k, first.bn), q, rows, cu, cu, 2, *numbers[1:],
            grid=(1,), **constants(q, k, spec, first),
        ),
        "key gradient": key_gradient_kernel.warmup(
            descriptor(q, second.bm), k, k, descriptor(q, second.bm), rows, rows, k, k, cu, cu, 2, 40, *numbers,
            **back, **constants(q, k, spec, second),
        ),
        "query gradient": query_gradient_kernel.warmup(
            q, descriptor(k, third.bn), descriptor(k, third.bn), q, rows, rows, q, cu, cu, 2, 40, *numbers,
            **back, **constants(q, k, spec, third),
        ),
    }  # fmt: skip
    return [KernelNeed(name, head_dim, resources(kernel)) for name, kernel in compiled.items()]


def _absent(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")
