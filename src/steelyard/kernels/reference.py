"""Plain-torch twins of every kernel: slow, row by row, the truth that fast backends are tested against.

Not for serving. Every function works in any float dtype; float64 inputs give the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from steelyard.kernels.attention import Attention, AttnSpec, Batch, KvLayer
from steelyard.kernels.backend import Fusions, Stored
from steelyard.kernels.kv_fp8 import as_bytes, hadamard, to_stored
from steelyard.kernels.sampling import Controls


def write_kv(k: Tensor, v: Tensor, kv: KvLayer, slots: Tensor) -> None:
    """Scatter k, v [T, Hkv, D] into the pool at `slots` [T]; slot -1 is padding and is not written."""
    kept = slots >= 0
    k = k if kv.k_scale is None else hadamard(k)
    block, offset = slots[kept] // kv.block_size, slots[kept] % kv.block_size
    for pool, new, scale in ((kv.k, k, kv.k_scale), (kv.v, v, kv.v_scale)):
        as_bytes(pool)[block, :, offset] = as_bytes(to_stored(new[kept], scale, pool.dtype))


def attend_row(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """One row: q [Q, Hq, D] are the last Q of C positions, k and v [C, Hkv, D]: (out [Q, Hq, D], lse [Q, Hq]).

    softmax(scale * q.k^T) v (Vaswani et al., 2017) with grouped heads, window, soft cap and sinks as AttnSpec says.
    """
    num_q, num_heads, _ = q.shape
    num_keys, num_kv_heads, _ = k.shape
    repeat = num_heads // num_kv_heads
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    query_at = torch.arange(num_keys - num_q, num_keys)[:, None]
    key_at = torch.arange(num_keys)[None, :]
    visible = key_at <= query_at if spec.causal else torch.ones(num_q, num_keys, dtype=torch.bool)
    if spec.window is not None:
        visible = visible & ((key_at > query_at - spec.window) | (key_at < spec.keep_first))
    scores = scores.masked_fill(~visible, -math.inf)
    if spec.sinks is not None:
        sink = spec.sinks.to(scores.dtype)[:, None, None].expand(-1, num_q, 1)
        lse = torch.logsumexp(torch.cat([scores, sink], dim=-1), dim=-1)
    else:
        lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See Backend.rms_norm."""
    wide = _wide(x)
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, H, D] by cos_sin [T, rot]; dimensions from `rot` on pass through."""
    half = cos_sin.shape[-1] // 2
    wide = _wide(x)
    cos, sin = cos_sin[:, None, :half].to(wide.dtype), cos_sin[:, None, half:].to(wide.dtype)
    low, high = wide[..., :half], wide[..., half : 2 * half]
    turned = [low * cos - high * sin, high * cos + low * sin, wide[..., 2 * half :]]
    return torch.cat(turned, dim=-1).to(x.dtype)


def activate(x: Tensor, activation: str) -> Tensor:
    """silu: x * sigmoid(x). gelu: x * Phi(x). gelu_tanh: its tanh approximation (Hendrycks and Gimpel, 2016)."""
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    if activation == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    assert activation == "gelu_tanh", activation
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gated(x: Tensor, activation: str) -> Tensor:
    """See Backend.gated."""
    gate, up = _wide(x).chunk(2, dim=-1)
    return (activate(gate, activation) * up).to(x.dtype)


def sample_row(logits: Tensor, u: float, *, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """One token from logits [V] (penalties, bias and mask already applied) by a full sort: the truth of the sampler.

    Tokens ranked by (value down, id up) are kept while rank < top_k and the mass before them is < top_p of what top_k
    left; min_p drops those below min_p times the best. The token is the inverse CDF at `u`, in id order.
    """
    if temperature < 1e-5:
        return int(logits.argmax())
    p = torch.softmax(logits.double() / temperature, dim=-1)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    order = torch.argsort(p, descending=True, stable=True)
    ranked = p[order]
    if top_k > 0:
        ranked[top_k:] = 0.0
    before = torch.cumsum(ranked, dim=0) - ranked
    ranked = torch.where(before < top_p * ranked.sum(), ranked, 0.0)
    kept = torch.zeros_like(p).scatter(0, order, ranked)
    cdf = torch.cumsum(kept, dim=0)
    return int(torch.searchsorted(cdf, u * cdf[-1], right=True))


class ReferenceAttention:
    """The Attention protocol, one row after another, by the formula."""

    name = "reference"

    def prepare(self, batch: Batch) -> None:
        """Nothing to do."""

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KvLayer, batch: Batch, spec: AttnSpec, out: Tensor
    ) -> Tensor | None:
        """See Attention.forward."""
        if k is not None and v is not None:
            write_kv(k, v, kv, batch.slots[spec.group])
        table = batch.tables[spec.group]
        lse = torch.full(q.shape[:2], -math.inf, dtype=_wide(q).dtype)
        for row in range(batch.ctx_len.shape[0]):
            first, last = int(batch.q_start[row]), int(batch.q_start[row + 1])
            ctx = int(batch.ctx_len[row])
            if first == last:
                continue
            at = torch.arange(ctx)
            block, offset = table[row, at // kv.block_size].long(), at % kv.block_size
            wide = _wide(q[first:last]) if kv.k_scale is None else hadamard(q[first:last])
            keys, values = (
                _read(pool[block, :, offset], scale, wide.dtype)
                for pool, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale))
            )
            row_out, row_lse = attend_row(wide, keys, values, spec)
            out[first:last] = row_out.to(out.dtype)
            lse[first:last] = row_lse
        return lse if spec.want_lse else None


class ReferenceBackend:
    """The Backend protocol in plain torch."""

    name = "reference"
    fusions: Fusions | None = None

    def __init__(self) -> None:
        self.attention: Attention = ReferenceAttention()

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        """See Backend.activation_dtype."""
        return weights

    def kv_dtype(self, weights: torch.dtype) -> torch.dtype:
        """See Backend.kv_dtype."""
        return weights

    def pack(self, weight: Tensor, stored: Sequence[Stored]) -> Tensor:
        """See Backend.pack."""
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Backend.linear."""
        product = x @ weight.T
        return product if bias is None else product + bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend.rms_norm."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Backend.add_rms_norm."""
        total = residual + x
        return rms_norm(total, weight, eps), total

    def rotate(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """See Backend.rotate."""
        return rotate(x, cos_sin)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """See Backend.gated."""
        return gated(x, activation)

    def choose(self, logits: Tensor, u: Tensor, controls: Controls) -> Tensor:
        """See Backend.choose."""
        chosen = [
            sample_row(
                row,
                float(u[i]),
                temperature=float(controls.temperature[i]),
                top_k=0 if controls.top_k is None else int(controls.top_k[i]),
                top_p=1.0 if controls.top_p is None else float(controls.top_p[i]),
                min_p=0.0 if controls.min_p is None else float(controls.min_p[i]),
            )
            for i, row in enumerate(logits)
        ]
        return torch.tensor(chosen, dtype=torch.int64)


def _read(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a pool's numbers [C, Hkv, D] stand for."""
    wide = _wide(stored).to(dtype)
    return wide if scale is None else wide * scale.to(dtype)[:, None]


def _wide(x: Tensor) -> Tensor:
    """float64 stays; everything narrower is computed in float32."""
    return x if x.dtype == torch.float64 else x.float()
