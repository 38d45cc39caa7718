"""Attention over paged KV on a CPU: rows of like size are gathered and attended together, in one call a layer.

    decode rows    q [R, Hkv, G, D]      grouped heads folded into the query length
    prefill rows   q [R, Hkv, G, Q, D]   one call a row, or padded together where rows are alike
    keys           whole blocks gathered by table: [R, Hkv, blocks * block_size, D] in one copy

Which rows go together, which blocks they read and what is masked is worked out once a step and shared by all layers
of a KV group.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from steelyard.kernels.attention import AttnSpec, Batch, KvLayer

PADDING = 2  # rows are attended together while padding at most doubles what they read
SMALL = 64  # prefills longer than this fill a call by themselves; keys fewer than this are not worth a call


@dataclass(frozen=True, slots=True)
class Bundle:
    """Rows attended in one call, padded to `num_q` queries.

    tokens   int64 [R * num_q] packed index of each query, the last one repeated as padding; None: a plain slice
    first    the slice's first packed token
    q_len    int64 [R]
    is_fresh one row whose keys are exactly its new tokens
    """

    rows: Tensor
    tokens: Tensor | None
    first: int
    num_q: int
    q_len: Tensor
    ctx_len: Tensor
    is_fresh: bool

    @property
    def num_rows(self) -> int:
        return self.rows.numel()


@dataclass(frozen=True, slots=True)
class Keys:
    """What a bundle reads in one KV group: flat block indexes [R * Hkv * blocks], and what of it is visible.

    visible  bool [R, 1, num_q, keys]; None: all
    """

    index: Tensor
    num_keys: int
    visible: Tensor | None


class CpuAttention:
    """The Attention protocol. `prepare` forgets the last step's arrangement."""

    name = "cpu"

    def __init__(self) -> None:
        self._bundles: list[Bundle] = []
        self._keys: dict[tuple[int, int, int | None, bool], Keys] = {}
        self._writes: dict[int, tuple[Tensor, Tensor | None]] = {}

    def prepare(self, batch: Batch) -> None:
        """Bundle the rows: decodes and prefills apart, each with rows of like length."""
        self._keys.clear()
        self._writes.clear()
        starts, lengths = batch.q_start.tolist(), batch.ctx_len.tolist()
        counts = [last - first for first, last in pairwise(starts)]
        decodes = list(range(batch.num_decode))
        prefills = [r for r in range(batch.num_decode, len(lengths)) if counts[r] > 0]
        self._bundles = [
            _bundle(rows, starts, counts, lengths)
            for alike in (decodes, prefills)
            for rows in _split_alike(alike, counts, lengths)
        ]

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KvLayer, batch: Batch, spec: AttnSpec, out: Tensor
    ) -> Tensor | None:
        """See Attention.forward."""
        if k is not None and v is not None:
            self._write(k, v, kv, batch.slots[spec.group], spec.group)
        lse = torch.empty(q.shape[:2], dtype=torch.float32) if spec.want_lse else None
        for number, bundle in enumerate(self._bundles):
            if k is not None and v is not None and _is_fresh_causal(bundle, spec):
                rows = slice(bundle.first, bundle.first + bundle.num_q)
                out[rows] = _attend_fresh(q[rows], k[rows], v[rows], spec)
                continue
            place = (number, spec.group, spec.window, spec.causal)
            if place not in self._keys:
                self._keys[place] = _visible_keys(bundle, kv, batch.tables[spec.group], spec)
            _attend(bundle, self._keys[place], q, kv, spec, out, lse)
        return lse

    def _write(self, k: Tensor, v: Tensor, kv: KvLayer, slots: Tensor, group: int) -> None:
        """One row copy per (token, head) into each of the two pools; padding is left out."""
        if group not in self._writes:
            kept = None if bool((slots >= 0).all()) else torch.nonzero(slots >= 0)[:, 0]
            used = slots if kept is None else slots[kept]
            block, offset = used // kv.block_size, used % kv.block_size
            head = torch.arange(kv.k.shape[1]) * kv.block_size
            rows_per_block = kv.k.stride(0) // kv.k.shape[3]
            index = (block * rows_per_block + offset)[:, None] + head
            self._writes[group] = (index.flatten(), kept)
        index, kept = self._writes[group]
        for pool, new in ((kv.k, k), (kv.v, v)):
            used = new if kept is None else new[kept]
            dim = pool.shape[3]
            _as_runs(pool, dim).index_copy_(0, index, used.reshape(-1, dim).to(pool.dtype))


def _split_alike(rows: list[int], counts: list[int], lengths: list[int]) -> list[list[int]]:
    """Rows in bundles within which padding at most doubles queries and keys; long prefills stay alone."""
    bundles: list[list[int]] = []
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        if bundles:
            first = bundles[-1][0]
            alike = lengths[row] * PADDING >= min(lengths[first], lengths[row] + SMALL)
            alike_q = counts[row] * PADDING >= counts[first] and counts[first] * PADDING >= counts[row]
            if alike and alike_q and max(counts[first], counts[row]) <= SMALL:
                bundles[-1].append(row)
                continue
        bundles.append([row])
    return [sorted(bundle) for bundle in bundles]


def _bundle(rows: list[int], starts: list[int], counts: list[int], lengths: list[int]) -> Bundle:
    num_q = max(counts[r] for r in rows)
    whole = all(counts[r] == num_q for r in rows) and rows == list(range(rows[0], rows[0] + len(rows)))
    tokens = None
    q_len = torch.tensor([counts[r] for r in rows])
    if not whole:
        at = torch.minimum(torch.arange(num_q), q_len[:, None] - 1)
        tokens = (torch.tensor([starts[r] for r in rows])[:, None] + at).flatten()
    return Bundle(
        rows=torch.tensor(rows),
        tokens=tokens,
        first=starts[rows[0]],
        num_q=num_q,
        q_len=q_len,
        ctx_len=torch.tensor([lengths[r] for r in rows]),
        is_fresh=len(rows) == 1 and counts[rows[0]] == lengths[rows[0]],
    )


def _visible_keys(bundle: Bundle, kv: KvLayer, table: Tensor, spec: AttnSpec) -> Keys:
    """The blocks that hold any key some query of the bundle sees, and the mask over their slots."""
    size = kv.block_size
    first_q = bundle.ctx_len - bundle.q_len
    lowest = torch.zeros_like(first_q) if spec.window is None else (first_q - spec.window + 1).clamp(min=0)
    first_block = lowest // size
    num_keys = int((bundle.ctx_len - first_block * size).max())
    num_blocks = -(-num_keys // size)
    block = first_block[:, None] + torch.arange(num_blocks)
    physical = table[bundle.rows].gather(1, block.clamp(max=table.shape[1] - 1)).long()
    # Beyond a row's end its table may still name blocks of a former row; the null block is always readable.
    physical = torch.where(block * size < bundle.ctx_len[:, None], physical, 0)
    key_at = (block[:, :, None] * size + torch.arange(size)).flatten(1)[:, None, :num_keys]
    query_at = first_q[:, None] + torch.minimum(torch.arange(bundle.num_q), bundle.q_len[:, None] - 1)
    query_at = query_at[:, :, None]
    visible = key_at <= query_at if spec.causal else key_at < bundle.ctx_len[:, None, None]
    if spec.window is not None:
        visible = visible & (key_at > query_at - spec.window)
    runs_per_block = kv.k.stride(0) // (size * kv.k.shape[3])
    index = physical[:, None, :] * runs_per_block + torch.arange(kv.k.shape[1])[:, None]
    return Keys(index.flatten(), num_keys, None if bool(visible.all()) else visible[:, None])


def _attend(
    bundle: Bundle, keys: Keys, q: Tensor, kv: KvLayer, spec: AttnSpec, out: Tensor, lse: Tensor | None
) -> None:
    num_rows, num_q, num_heads = bundle.num_rows, bundle.num_q, q.shape[1]
    if bundle.tokens is None:
        queries = q[bundle.first : bundle.first + num_rows * num_q]
    else:
        queries = q[bundle.tokens]
    queries = queries.unflatten(0, (num_rows, num_q)).transpose(1, 2)
    k, v = (_gather(pool, keys, num_rows, kv.block_size, q.dtype) for pool in (kv.k, kv.v))
    found, found_lse = _attend_dense(queries, k, v, keys.visible, spec)
    packed = found.transpose(1, 2).reshape(num_rows * num_q, num_heads, -1)
    # Padding repeats a row's last query, so it is written twice with equal values.
    tokens = bundle.tokens
    if tokens is None:
        out[bundle.first : bundle.first + num_rows * num_q] = packed
    else:
        out.index_copy_(0, tokens, packed)
    if lse is not None:
        packed_lse = found_lse.transpose(1, 2).reshape(num_rows * num_q, num_heads)
        at = torch.arange(bundle.first, bundle.first + num_rows * num_q) if tokens is None else tokens
        lse.index_copy_(0, at, packed_lse)


def _gather(pool: Tensor, keys: Keys, num_rows: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """[R, Hkv, num_keys, D]: one copy, whole (block, head) runs at a time."""
    num_kv_heads, dim = pool.shape[1], pool.shape[3]
    runs = _as_runs(pool, block_size * dim).index_select(0, keys.index)
    return runs.view(num_rows, num_kv_heads, -1, dim)[:, :, : keys.num_keys].to(dtype)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """q [R, Hq, Q, D], k and v [R, Hkv, K, D], visible bool [R, 1, Q, K]: (out [R, Hq, Q, D], lse [R, Hq, Q]).

    The second is empty where SDPA was used, which does not return it.
    """
    num_rows, num_heads, num_q, dim = q.shape
    num_kv_heads = k.shape[1]
    if spec.softcap is None and spec.sinks is None and not spec.want_lse:
        if num_q == 1:
            folded = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
            found = scaled_dot_product_attention(folded, k, v, attn_mask=visible, scale=spec.scale)
            return found.reshape(q.shape), found.new_empty(0)
        found = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=spec.scale, enable_gqa=True)
        return found, found.new_empty(0)
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.reshape(num_rows, num_kv_heads, -1, dim).to(wide)
    scores = (grouped @ k.to(wide).transpose(-1, -2)).mul_(spec.scale)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores = scores.view(num_rows, num_heads, num_q, -1)
    if visible is not None:
        scores = scores.masked_fill_(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    if spec.sinks is not None:
        lse = torch.logaddexp(lse, spec.sinks.to(wide)[:, None])
    weights = scores.sub_(lse[..., None]).exp_().view(num_rows, num_kv_heads, -1, scores.shape[-1])
    return (weights @ v.to(wide)).view(q.shape).to(q.dtype), lse


def _is_fresh_causal(bundle: Bundle, spec: AttnSpec) -> bool:
    """A prefill from the very beginning under the plain causal mask: the new K and V are all there is."""
    plain = spec.causal and spec.softcap is None and spec.sinks is None and not spec.want_lse
    return bundle.is_fresh and plain and (spec.window is None or bundle.num_q <= spec.window)


def _attend_fresh(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> Tensor:
    """[Q, Hq, D] from new q, k, v of one row."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
    return found[0].transpose(0, 1)


def _as_runs(pool: Tensor, run_len: int) -> Tensor:
    """The pool's memory from its first element on, as [n, run_len]: what is contiguous within a (block, head)."""
    assert pool.stride()[1:] == (pool.shape[2] * pool.shape[3], pool.shape[3], 1), "a block must be contiguous"
    last = (pool.shape[0] - 1) * pool.stride(0) + pool.shape[1] * pool.stride(1)
    return pool.as_strided((last // run_len, run_len), (run_len, 1), pool.storage_offset())
