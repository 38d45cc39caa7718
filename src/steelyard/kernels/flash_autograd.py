"""`flash_attention`: exact attention with a gradient, over packed or padded-to-equal sequences, on our Triton kernels.

For training, gradients and measurement. Serving goes through the paged backends and never through here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from steelyard.errors import InvalidRequest
from steelyard.kernels.triton_backward import delta_kernel, key_gradient_kernel, query_gradient_kernel
from steelyard.kernels.triton_train import train_forward_kernel

LOG2_E = math.log2(math.e)
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class FlashSpec:
    """What is computed. With Sq queries and Sk keys of a sequence, query i stands at position p = i + Sk - Sq.

    scale      multiplies q.k, above 0; None: head_dim ** -0.5
    causal     keys at positions <= p
    window     and only positions > p - window; None: all
    dropout_p  share of the weights set to 0 (the rest grow by 1 / (1 - p)); which ones depends on (seed, query head,
               packed query row, key position) alone, so forward and backward, and any tiling, agree
    """

    scale: float | None = None
    causal: bool = False
    window: int | None = None
    dropout_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scale is not None and not self.scale > 0:
            raise InvalidRequest(f"scale must be above 0, got {self.scale}", param="scale")
        if self.window is not None and self.window < 1:
            raise InvalidRequest(f"window must be at least 1, got {self.window}", param="window")
        if not 0.0 <= self.dropout_p < 1.0:
            raise InvalidRequest(f"dropout_p must be in [0, 1), got {self.dropout_p}", param="dropout_p")
        if not 0 <= self.seed < 2**63:
            raise InvalidRequest(f"seed must be in [0, 2**63), got {self.seed}", param="seed")


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one kernel: BM queries by BN keys a step, warps, pipeline stages, and a limit of registers a thread
    (128 lets two programs of 8 warps share a multiprocessor)."""

    bm: int
    bn: int
    warps: int
    stages: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class Tiles:
    forward: Tile
    keys: Tile
    queries: Tile


def tiles_for(head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tile shapes by head size and dtype, chosen so that sm_90 code fits its registers and shared memory.

    The rows of the log-sum-exp are padded to the forward's bm, which every other bm divides. float32 multiplies exactly
    on the ordinary units, so its tiles are small; it is for checking, not for speed.
    """
    if dtype == torch.float32:
        small = Tile(32, 32, 4, 1) if head_dim <= 64 else Tile(16, 16, 4, 1)
        return Tiles(small, small, small)
    if head_dim <= 64:
        return Tiles(Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3))
    if head_dim <= 128:
        return Tiles(Tile(128, 64, 8, 2, 128), Tile(32, 128, 8, 3), Tile(128, 64, 8, 2))
    return Tiles(Tile(128, 32, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2))


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: FlashSpec = FlashSpec(), cu_seqlens: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """softmax(scale q k^T) v with a gradient for q, k and v; memory linear in the length.

    Packed: q [Tq, Hq, D]; k, v [Tk, Hkv, D]; `cu_seqlens` = (queries, keys), int32 [S + 1] each on the tensors' device,
    rising from 0 to the number of tokens. Batched: q [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D]; `cu_seqlens` None. Returns
    the shape of q. float32, float16 or bfloat16; D a multiple of 16 bytes, at most 256; Hq a multiple of Hkv.

    The gradient is deterministic. A query that sees no key gives 0. A NaN or infinity may spoil the sequence packed
    before its own (tiles are read whole and weighed with 0). Raises InvalidRequest naming the argument at fault.
    Source: FlashAttention (Dao et al. 2022) and FlashAttention-2 (Dao 2023).
    """
    _check(q, k, v, cu_seqlens)
    if cu_seqlens is not None:
        return _packed(q, k, v, cu_seqlens[0], cu_seqlens[1], spec)
    batch, num_q, num_k = q.shape[0], q.shape[1], k.shape[1]
    cu_q, cu_k = (
        torch.arange(0, (batch + 1) * n, n, dtype=torch.int32, device=q.device) if n else _zeros(batch, q.device)
        for n in (num_q, num_k)
    )
    return _packed(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, spec).view(q.shape)


class FlashAttention(torch.autograd.Function):
    """The packed operator. Saves q, k, v, the output and the log-sum-exp: O(T) memory beside the inputs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, spec: FlashSpec) -> Tensor:
        q, k, v = _dense(q), _dense(k), _dense(v)
        out = torch.empty_like(q)
        tile, num_seqs = tiles_for(q.shape[2], q.dtype).forward, cu_q.numel() - 1
        num_tiles = q.shape[0] // tile.bm + num_seqs
        lse = torch.empty(q.shape[1], num_tiles * tile.bm, dtype=torch.float32, device=q.device)
        if q.numel() and k.numel():
            numbers = scalars(spec, q.shape[2])
            keys, values = descriptor(k, tile.bn), descriptor(v, tile.bn)
            train_forward_kernel[(q.shape[1], num_tiles)](
                q, keys, values, out, lse, cu_q, cu_k, num_seqs, *numbers[1:], **constants(q, k, spec, tile)
            )
        else:
            out.zero_()
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        if not (q.numel() and k.numel()):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None, None, None
        grad = _dense(grad)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tiles, num_seqs = tiles_for(q.shape[2], q.dtype), cu_q.numel() - 1
        num_tiles, padding = lse.shape[1] // tiles.forward.bm, {"ROWS": tiles.forward.bm}
        rows = (lse, _delta(out, grad, lse, cu_q, tiles.forward.bm))
        sizes = (cu_q, cu_k, num_seqs, num_tiles, *scalars(ctx.spec, q.shape[2]))
        tile = tiles.queries
        keys, values = descriptor(k, tile.bn), descriptor(v, tile.bn)
        query_gradient_kernel[(q.shape[1], q.shape[0] // tile.bm + num_seqs)](
            q, keys, values, grad, *rows, dq, *sizes, **constants(q, k, ctx.spec, tile), **padding
        )
        tile = tiles.keys
        queries, grads = descriptor(q, tile.bm), descriptor(grad, tile.bm)
        key_gradient_kernel[(k.shape[1], k.shape[0] // tile.bn + num_seqs)](
            queries, k, v, grads, *rows, dk, dv, *sizes, **constants(q, k, ctx.spec, tile), **padding
        )
        return dq, dk, dv, None, None, None


def _dense(x: Tensor) -> Tensor:
    """Contiguous, and at an address that a tile descriptor takes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def descriptor(x: Tensor, num_tokens: int) -> TensorDescriptor:
    """Tiles of `num_tokens` tokens of one head of a contiguous [T, H, D]."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [num_tokens, 1, _padded(x.shape[2])])


def _packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, spec: FlashSpec) -> Tensor:
    out: Tensor = FlashAttention.apply(q, k, v, cu_q, cu_k, spec)
    return out


def _delta(out: Tensor, grad: Tensor, lse: Tensor, cu_q: Tensor, num_rows: int) -> Tensor:
    delta = torch.empty_like(lse)
    sizes = {"H": out.shape[1], "D": out.shape[2], "BD": _padded(out.shape[2]), "ROWS": num_rows}
    delta_kernel[(out.shape[1], lse.shape[1] // num_rows)](out, grad, delta, cu_q, cu_q.numel() - 1, **sizes)
    return delta


def scalars(spec: FlashSpec, head_dim: int) -> tuple[float, float, int, int, float]:
    """(scale, scale in base 2, seed, dropout threshold of 32 random bits, 1 / (1 - p))."""
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    return scale, scale * LOG2_E, spec.seed, dropout_threshold(spec.dropout_p), 1.0 / (1.0 - spec.dropout_p)


def dropout_threshold(dropout_p: float) -> int:
    """A weight is dropped if its 32 random bits are below this."""
    return min(round(dropout_p * 2**32), 2**32 - 1)


def constants(q: Tensor, k: Tensor, spec: FlashSpec, tile: Tile) -> dict[str, Any]:
    """Compile-time arguments of a training kernel for packed q, k and a tile."""
    limit = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
    return limit | {
        "H": q.shape[1],
        "HK": k.shape[1],
        "D": q.shape[2],
        "BD": _padded(q.shape[2]),
        "BM": tile.bm,
        "BN": tile.bn,
        "CAUSAL": spec.causal,
        "WINDOW": spec.window or 0,
        "DROPOUT": spec.dropout_p > 0,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _zeros(batch: int, device: torch.device) -> Tensor:
    return torch.zeros(batch + 1, dtype=torch.int32, device=device)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[Tensor, Tensor] | None) -> None:
    dims = 4 if cu_seqlens is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            need = "[batch, length, heads, head dim]" if dims == 4 else "[tokens, heads, head dim]"
            raise InvalidRequest(f"{name} must have shape {need}, got {tuple(x.shape)}", param=name)
        if x.dtype != q.dtype or x.dtype not in DTYPES:
            raise InvalidRequest(
                f"{name} must have the dtype of q, one of float32, float16, bfloat16; got {x.dtype}", param=name
            )
        if x.shape[-1] != q.shape[-1] or not 1 <= x.shape[-1] <= MAX_HEAD_DIM or x.shape[-1] * x.itemsize % 16:
            raise InvalidRequest(
                f"{name} must have q's head size, a multiple of {16 // x.itemsize} up to {MAX_HEAD_DIM}; "
                f"got {x.shape[-1]}",
                param=name,
            )
    if k.shape != v.shape or (dims == 4 and k.shape[0] != q.shape[0]):
        raise InvalidRequest(f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree, and with q's batch", param="k")
    if q.shape[-2] % k.shape[-2]:
        raise InvalidRequest(f"{q.shape[-2]} query heads are no multiple of {k.shape[-2]} KV heads", param="k")
    for name, cu in zip(("queries", "keys"), cu_seqlens or ()):
        if cu.dtype != torch.int32 or cu.dim() != 1 or cu.device != q.device or not cu.is_contiguous():
            raise InvalidRequest(
                f"cu_seqlens of {name} must be a contiguous int32 vector on {q.device}", param="cu_seqlens"
            )
    if cu_seqlens is not None and (cu_seqlens[0].numel() != cu_seqlens[1].numel() or cu_seqlens[0].numel() < 2):
        raise InvalidRequest("cu_seqlens of queries and keys must have one length, at least 2", param="cu_seqlens")
