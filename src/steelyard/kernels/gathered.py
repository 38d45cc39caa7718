"""Attention the plain way, as baselines: keys and values are gathered into padded tensors, then attended by torch.

    naive   scores [R, Hq, Q, K] stand in memory, softmax over them, product with values: what a textbook writes
    sdpa    the same gathered tensors through torch's scaled_dot_product_attention

Runs on any device. Reads host sizes (max_q, max_ctx) that a captured graph would freeze, so steps must run eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from steelyard.kernels.attention import AttnSpec, Batch, KvLayer
from steelyard.kernels.cpu_kv import KvWriter
from steelyard.kernels.reference import write_kv

MAX_ELEMENTS = 2**28
"""Elements of padded scores, keys or queries of the rows taken together: 1 GiB of float32."""


class GatheredAttention:
    """The Attention protocol. `writer`: who else writes keys and values of the same step on a CPU."""

    def __init__(self, name: str, writer: KvWriter | None = None) -> None:
        assert name in ("naive", "sdpa"), name
        self.name = name
        self._writer = writer

    def prepare(self, batch: Batch) -> None:
        """See Attention.prepare."""
        if self._writer is not None:
            self._writer.forget()

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KvLayer, batch: Batch, spec: AttnSpec, out: Tensor
    ) -> Tensor | None:
        """See Attention.forward."""
        if k is not None and v is not None:
            write_kv(k, v, kv, batch.slots[spec.group])
        lse = torch.full(q.shape[:2], -math.inf, dtype=_wide(q.dtype), device=q.device) if spec.want_lse else None
        if batch.max_ctx == 0:  # a step of padding only
            out.zero_()
            return lse
        for first, last, num_q in self._parts(q, batch):
            self._attend((first, last, num_q), q, kv, batch, spec, (out, lse))
        return lse

    def _parts(self, q: Tensor, batch: Batch) -> Iterator[tuple[int, int, int]]:
        """(first row, last row, queries): decodes, then prefills, as many together as their scores may take."""
        num_rows = batch.ctx_len.shape[0]
        for low, high, num_q in ((0, batch.num_decode, 1), (batch.num_decode, num_rows, batch.max_q)):
            a_row = q.shape[1] * batch.max_ctx * max(num_q, q.shape[2])
            step = max(1, MAX_ELEMENTS // a_row)
            for first in range(low, high, step):
                yield first, min(first + step, high), num_q

    def _attend(
        self,
        part: tuple[int, int, int],
        q: Tensor,
        kv: KvLayer,
        batch: Batch,
        spec: AttnSpec,
        results: tuple[Tensor, Tensor | None],
    ) -> None:
        first, last, num_q = part
        starts, ends = batch.q_start[first:last].long(), batch.q_start[first + 1 : last + 1].long()
        ctx_len, q_len = batch.ctx_len[first:last].long(), ends - starts
        # Rows with fewer queries repeat their last one: it is written twice with equal values.
        within = torch.minimum(torch.arange(num_q, device=q.device), q_len[:, None] - 1)
        at = starts[:, None] + within
        key_at = torch.arange(batch.max_ctx, device=q.device)
        block = batch.tables[spec.group][first:last, key_at // kv.block_size].long()
        keys, values = (_gather(pool, block, key_at % kv.block_size) for pool in (kv.k, kv.v))
        query_at = (ctx_len - q_len)[:, None] + within
        visible = key_at < ctx_len[:, None, None]
        if spec.causal:
            visible = visible & (key_at <= query_at[:, :, None])
        if spec.window is not None:
            visible = visible & ((key_at > query_at[:, :, None] - spec.window) | (key_at < spec.keep_first))
        queries = q[at].transpose(1, 2).to(keys.dtype)  # [R, Hq, Q, D]
        plain = spec.softcap is None and spec.sinks is None and not spec.want_lse
        if self.name == "sdpa" and plain:
            found, found_lse = _torch_attention(queries, keys, values, visible, spec), None
        else:
            found, found_lse = materialised(queries, keys, values, visible, spec)
        out, lse = results
        out[at] = found.transpose(1, 2).to(out.dtype)
        if lse is not None and found_lse is not None:
            lse[at] = found_lse.transpose(1, 2).to(lse.dtype)


def materialised(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """q [R, Hq, Q, D], k and v [R, Hkv, K, D], visible bool [R, Q, K]: (out [R, Hq, Q, D], lse [R, Hq, Q]).

    Heads are repeated, every score is stored, softmax is in float32 (Vaswani et al., 2017, section 3.2.1).
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = (q @ k.transpose(-1, -2)).to(_wide(q.dtype)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    if spec.sinks is not None:
        lse = torch.logaddexp(lse, spec.sinks.to(scores.dtype)[:, None])
    weights = torch.exp(scores - lse[..., None]).to(v.dtype)
    return weights @ v, lse


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttnSpec) -> Tensor:
    """The same by torch. One query a row: heads of a group stand in for queries, so that no key is copied."""
    num_rows, num_heads, num_q, dim = q.shape
    if num_q == 1:
        folded = q.reshape(num_rows, k.shape[1], -1, dim)
        return scaled_dot_product_attention(folded, k, v, attn_mask=visible[:, None], scale=spec.scale).view(q.shape)
    repeat = num_heads // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    return scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], scale=spec.scale)


def _gather(pool: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    """Keys or values of rows, [R, Hkv, K, D], by block [R, K] and place in it [K]."""
    return pool[block, :, offset].transpose(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
