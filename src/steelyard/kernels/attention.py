"""The attention seam: what every backend is given and must do. No kernel here.

    q [T, Hq, D]   k, v [T, Hkv, D]   new tokens of all rows, packed; row r owns q_start[r] .. q_start[r+1]
    KV pool        [blocks, Hkv, block_size, D] a layer; position p of row r is slot p % B of block table[r, p // B]

Rows that decode (one new token) come first: rows [0, num_decode) have exactly one token each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Views of one layer's K and V, each [blocks, Hkv, block_size, D]; the block stride may be large.

    Scales, float32 [Hkv], are None unless the pool is fp8 (kv_fp8.py): a number is what is stored times its head's
    scale, and keys are held in the basis that kv_fp8.py says. Values of scales are set once, before the first step.
    Block 0 is the null block: readable, never written by a request.
    The pool starts as zeros and v is written finite (NaN and infinities as 0): kernels read whole blocks and weigh
    unseen slots with zero, which a NaN would survive. A NaN in k stays, and shows in its own request's logits.
    """

    k: Tensor
    v: Tensor
    block_size: int
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttnSpec:
    """What one layer's attention computes.

    scale     multiplies q.k;  softcap c: c * tanh(scale * q.k / c), None: off
    causal    query at position p sees keys at positions <= p
    window    and only positions > p - window; None: all
    keep_first  with a window, positions < keep_first too (Xiao et al. 2024, "Efficient streaming language models with
                attention sinks"); every key keeps the position it was written with
    sinks     [Hq] logits of a learned key with value zero that joins the softmax (gpt-oss); None: off
    group     the KV group whose slots and tables are used
    """

    scale: float
    causal: bool = True
    window: int | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    group: int = 0
    want_lse: bool = False
    keep_first: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows on the device. R rows, T tokens; shapes may be a bucket's, then the tail is padding.

    positions  int64 [T]
    slots      per group, int64 [T]: flat slot block * block_size + offset where the new K, V go; -1: padding
    q_start    int32 [R + 1]
    ctx_len    int32 [R]: keys visible to a row's last new token, itself included
    tables     per group, int32 [R, max blocks]
    num_tokens, num_decode  host integers: real tokens, and rows at the front with one new token
    """

    positions: Tensor
    slots: tuple[Tensor, ...]
    q_start: Tensor
    ctx_len: Tensor
    tables: tuple[Tensor, ...]
    num_tokens: int
    num_decode: int
    max_q: int = 1
    max_ctx: int = 0


class Attention(Protocol):
    """A backend. Never synchronises; after `prepare`, safe to capture in a CUDA graph."""

    name: str

    def prepare(self, batch: Batch) -> None:
        """Once a step, before the first layer."""
        ...

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KvLayer, batch: Batch, spec: AttnSpec, out: Tensor
    ) -> Tensor | None:
        """Write the new K and V into the pool, attend, fill `out` [T, Hq, D]; returns lse [T, Hq] (natural) if wanted.

        k and v None: a fused kernel has written them already. q, k, v and out may be views with a larger row stride.
        q and k are the model's own, over an fp8 pool too: who writes a key takes it into the pool's basis, and
        `forward` takes q there where it meets them; q itself is left as it is.
        """
        ...
