"""Attention on a CPU as two products and a softmax, a block of queries at a time. Keys are gathered elsewhere.

    keys      less their mean, which moves all scores of a query alike and so changes no weight
    scores    [R Hkv, G * QUERIES, keys up to the block's last]   rounded to bfloat16
    weights   softmax: float32 inside, rounded once
    out       weights @ v

Without the mean scores are small, and so is their rounding (smoothing K: SageAttention,
Zhang et al. 2025, section 4.2).

Torch's own attention never writes scores out, but multiplies bfloat16 without the instructions that products have,
unless the CPU has matrix units (AMX). Where it has none, these are two to three times as fast, at every length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from steelyard.kernels.cpu_linear import cast

QUERIES = 128
"""Queries of a head in one block: its scores stay in a core's cache up to some thousand keys."""
PROFILED_AS = "steelyard::attention_products"
FEW = 512
"""Scores of a head, over all rows, below which what counts is the number of calls and of meetings of threads."""


class OneThread:
    """While it is open, operators run on the calling thread: for work that is smaller than waking the others."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def are_few(num_rows: int, num_keys: int) -> bool:
    """Whether rows of one query each have so few keys that `attend_few` is the fastest way."""
    return num_rows * num_keys < FEW


def attend_few(q: Tensor, keys_values: Tensor, num_keys: int, scale: float, added: Tensor | None) -> Tensor:
    """One query a row: q [R, Hq, D] or [R Hq, D], keys and values [2, R, Hkv, K, D] of which `num_keys` count.

    Returns [R, Hkv, Hq / Hkv, D]. In float32 (float64 of such keys) throughout, which takes fewer calls than products
    of bfloat16. Heads that share keys are the queries of one. added: [R, 1, 1, num_keys] as in `attend`.
    """
    wide = torch.float64 if keys_values.dtype is torch.float64 else torch.float32
    _, num_rows, num_kv_heads, _, dim = keys_values.shape
    k, v = cast(keys_values, wide).narrow(3, 0, num_keys).unbind(0)
    queries = cast(q, wide).reshape(num_rows, num_kv_heads, -1, dim)
    return scaled_dot_product_attention(queries, k, v, added, scale=scale)


def are_faster(q: Tensor, num_keys: int) -> bool:
    """Whether products are faster than torch's own attention for q [R, Hq, Q, D] on this CPU."""
    if q.dtype != torch.bfloat16 or q.shape[0] * q.shape[2] * num_keys < FEW:
        return False
    has_products = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return has_products and not torch.cpu._is_amx_tile_supported()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, added: Tensor | None, is_causal: bool) -> Tensor:
    """q [R, Hq, Q, D], k and v [R, Hkv, K, D]: softmax(scale q k^T + added) v, [R, Hq, Q, D] in q's dtype.

    added      [R, 1, Q, K], 0 or -inf; None: nothing is hidden but by `is_causal`
    is_causal  the last query sees all keys, each one before it a key less
    """
    if torch.autograd._profiler_enabled():  # products and a softmax could be anybody's
        with torch.profiler.record_function(PROFILED_AS):
            return _attend(q, k, v, scale, added, is_causal)
    return _attend(q, k, v, scale, added, is_causal)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, added: Tensor | None, is_causal: bool) -> Tensor:
    num_rows, num_heads, num_q, dim = q.shape
    num_kv_heads, num_keys = k.shape[1], k.shape[2]
    grouped = (q * scale).reshape(num_rows * num_kv_heads, -1, num_q, dim)
    k = k - k.mean(dim=2, keepdim=True, dtype=torch.float32).to(k.dtype)
    k, v = k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)
    out = torch.empty_like(grouped)
    later = torch.full((QUERIES, QUERIES), -torch.inf, dtype=q.dtype).triu_(1) if is_causal else None
    for first in range(0, num_q, QUERIES):
        last = min(first + QUERIES, num_q)
        seen = num_keys - (num_q - last if is_causal else 0)
        queries = grouped[:, :, first:last].reshape(num_rows * num_kv_heads, -1, dim)
        scores = torch.bmm(queries, k[:, :, :seen]).view(num_rows, num_heads, last - first, seen)
        if later is not None:
            scores[..., seen - (last - first) :] += later[: last - first, : last - first]
        if added is not None:
            scores += added[:, :, first:last, :seen]
        weights = torch.softmax(scores, -1).view(num_rows * num_kv_heads, -1, seen)
        out[:, :, first:last] = torch.bmm(weights, v[:, :seen]).view(out.shape[0], -1, last - first, dim)
    return out.view(q.shape)
