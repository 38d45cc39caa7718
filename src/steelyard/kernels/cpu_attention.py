"""Attention over paged KV on a CPU: rows of like size are gathered and attended together, in one call a layer.

    decode rows    q [R, Hkv, G, D]      grouped heads folded into the query length
    prefill rows   q [R, Hq, Q, D]       one call a row, or padded together where rows are alike
    keys, values   whole blocks gathered by table: [R, Hkv, blocks * block_size, D] each, in one copy

Which rows go together, which blocks they read and what is masked is worked out once a step and shared by all layers
of a KV group. A bundle is attended in one of three ways:

    few      one query a row, few keys     float32 on one thread: what counts is the number of calls
    plain    nothing but a mask            products (cpu_products.py) or torch's own attention, whichever is faster here
    written  softcap, sinks or lse         scores written out, in float32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from steelyard.kernels import cpu_products
from steelyard.kernels.attention import AttnSpec, Batch, KvLayer
from steelyard.kernels.cpu_kv import KvWriter, Runs
from steelyard.kernels.kv_fp8 import hadamard

PADDING = 2  # rows are attended together while padding at most doubles what they read
SMALL = 64  # prefills longer than this fill a call by themselves; keys fewer than this are not worth a call


@dataclass(frozen=True, slots=True)
class Bundle:
    """Rows attended in one call, padded to `num_q` queries.

    tokens   int64 [R * num_q] packed index of each query, the last one repeated as padding; None: a plain slice
    first    the slice's first packed token
    q_len    int64 [R]
    is_fresh one row whose keys are exactly its new tokens
    shortest, longest  of ctx_len, on the host
    """

    rows: Tensor
    tokens: Tensor | None
    first: int
    num_q: int
    q_len: Tensor
    ctx_len: Tensor
    is_fresh: bool
    num_rows: int
    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Keys:
    """What a bundle reads in one KV group: flat block indexes [2 * R * Hkv * blocks], and what of it is visible.

    index      rows of Runs.blocks of one pool for both; the first half are those of K's or V's own
    visible    bool [R, 1, num_q, keys], or what is added to scores for torch's own attention: 0 or -inf; None: all
    is_causal  nothing but the causal mask of as many queries as keys
    are_few    so few, of one query a row, that they are attended in float32 on one thread
    """

    index: Tensor
    num_keys: int
    visible: Tensor | None
    is_causal: bool = False
    are_few: bool = False


class CpuAttention:
    """The Attention protocol. `prepare` forgets the last step's arrangement."""

    name = "cpu"

    def __init__(self, writer: KvWriter | None = None) -> None:
        """`writer`: shared with whoever else writes keys and values of the same step."""
        self._writer = writer or KvWriter()
        self._bundles: list[Bundle] = []
        self._keys: dict[tuple[int, int, int | None, bool, bool], Keys] = {}
        self._forget: list[Callable[[], None]] = [self._keys.clear, self._writer.forget]

    def at_each_step(self, forget: Callable[[], None]) -> None:
        """Have `forget` called by `prepare`: for whoever arranges the same step for other operators."""
        self._forget.append(forget)

    def prepare(self, batch: Batch) -> None:
        """Bundle the rows: decodes and prefills apart, each with rows of like length."""
        for forget in self._forget:
            forget()
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
            self._writer.write(torch.cat([k, v], dim=1), kv, batch.slots[spec.group])
        lse = torch.empty(q.shape[:2], dtype=torch.float32) if spec.want_lse else None
        runs, is_plain = self._writer.runs(kv), _is_plain(spec)
        for number, bundle in enumerate(self._bundles):
            place = (number, spec.group, spec.window, spec.causal, is_plain)  # keep_first is the window's
            keys = self._keys.get(place)
            if keys is None:
                keys = _visible_keys(bundle, kv, batch.tables[spec.group], spec, _computed_in(q, kv))
                self._keys[place] = keys
            if keys.are_few:
                _attend_few(bundle, keys, q, runs, spec.scale, out)
            else:
                _attend(bundle, keys, q, runs, spec, (out, lse))
        return lse

    def keys_of_one(self, kv: KvLayer, batch: Batch, spec: AttnSpec) -> Keys | None:
        """What the step's one token reads; None if there are more, or so many keys that it is no small matter."""
        if len(self._bundles) != 1 or batch.num_tokens != 1 or batch.num_decode != 1:
            return None
        keys = _visible_keys(self._bundles[0], kv, batch.tables[spec.group], spec, torch.float32)
        return keys if keys.are_few else None


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
        num_rows=len(rows),
        shortest=min(lengths[r] for r in rows),
        longest=max(lengths[r] for r in rows),
    )


def _visible_keys(bundle: Bundle, kv: KvLayer, table: Tensor, spec: AttnSpec, dtype: torch.dtype) -> Keys:
    """The blocks that hold any key some query of the bundle sees, and the mask over their slots.

    A mask that is added is of `dtype`.
    """
    if bundle.num_q == 1 and bundle.longest == bundle.shortest and spec.window is None:
        physical = table.index_select(0, bundle.rows)[:, : -(-bundle.longest // kv.block_size)].long()
        num_keys, visible = bundle.longest, None
    else:
        physical, num_keys, visible = _masked_blocks(bundle, kv.block_size, table, spec)
    are_few, is_plain = _are_few(bundle, kv, spec, num_keys), _is_plain(spec)
    is_square = bundle.is_fresh and spec.causal and (spec.window is None or bundle.num_q <= spec.window)
    is_causal = visible is not None and is_plain and is_square
    if is_causal:
        visible = None
    elif visible is not None and is_plain:
        wide = torch.promote_types(dtype, torch.float32) if are_few else dtype
        visible = torch.zeros(visible.shape, dtype=wide).masked_fill_(~visible, -torch.inf)
    return Keys(_index(physical, kv), num_keys, visible, is_causal, are_few)


def _masked_blocks(bundle: Bundle, size: int, table: Tensor, spec: AttnSpec) -> tuple[Tensor, int, Tensor | None]:
    """(blocks int64 [R, blocks], keys in them that count, bool [R, 1, num_q, keys] or None where all are visible)."""
    first_q = bundle.ctx_len - bundle.q_len
    lowest = torch.zeros_like(first_q) if spec.window is None else (first_q - spec.window + 1).clamp(min=0)
    kept = 0 if spec.window is None else -(-spec.keep_first // size)
    first_block = (lowest // size).clamp(min=kept)
    held = max(int((bundle.ctx_len - first_block * size).max()), 0)
    block = first_block[:, None] + torch.arange(-(-held // size))
    block = torch.cat([torch.arange(kept).expand(bundle.num_rows, -1), block], 1)
    num_keys = min(kept * size + held, bundle.longest)
    physical = table[bundle.rows].gather(1, block.clamp(max=table.shape[1] - 1)).long()
    # Beyond a row's end its table may still name blocks of a former row; the null block is always readable.
    physical = torch.where(block * size < bundle.ctx_len[:, None], physical, 0)
    key_at = (block[:, :, None] * size + torch.arange(size)).flatten(1)[:, None, :num_keys]
    query_at = first_q[:, None] + torch.minimum(torch.arange(bundle.num_q), bundle.q_len[:, None] - 1)
    query_at = query_at[:, :, None]
    visible = key_at <= query_at if spec.causal else key_at < bundle.ctx_len[:, None, None]
    if spec.window is not None:
        visible = visible & ((key_at > query_at - spec.window) | (key_at < spec.keep_first))
    return physical, num_keys, None if bool(visible.all()) else visible[:, None]


def _index(physical: Tensor, kv: KvLayer) -> Tensor:
    """Keys.index of blocks int64 [R, blocks]."""
    runs_per_block = kv.k.stride(0) // (kv.block_size * kv.k.shape[3])
    head = torch.arange(2 * kv.k.shape[1]).view(2, 1, -1, 1)
    return (physical[:, None, :] * runs_per_block + head).flatten()


def _are_few(bundle: Bundle, kv: KvLayer, spec: AttnSpec, num_keys: int) -> bool:
    is_simple = bundle.num_q == 1 and bundle.tokens is None and kv.k_scale is None and _is_plain(spec)
    return is_simple and cpu_products.are_few(bundle.num_rows, num_keys)


def _attend(
    bundle: Bundle, keys: Keys, q: Tensor, runs: Runs, spec: AttnSpec, results: tuple[Tensor, Tensor | None]
) -> None:
    num_rows, num_q, num_heads, kv = bundle.num_rows, bundle.num_q, q.shape[1], runs.kv
    out, lse = results
    tokens = bundle.tokens
    queries = q.narrow(0, bundle.first, num_rows * num_q) if tokens is None else q[tokens]
    gathered = _gather(runs, keys, num_rows)
    dtype = _computed_in(q, kv)
    queries = queries.unflatten(0, (num_rows, num_q)).transpose(1, 2)
    if kv.k_scale is not None:
        queries = hadamard(queries)
        queries = queries * _per_query_head(kv.k_scale, num_heads, queries.dtype)
    queries = queries.to(dtype)
    k, v = gathered.to(dtype).narrow(3, 0, keys.num_keys).unbind(0)
    found_lse = None
    if _is_plain(spec):
        found = _attend_plain(queries, k, v, keys, spec)
    else:
        found, found_lse = _attend_written(queries, k, v, keys, spec)
    if kv.v_scale is not None:
        found = found * _per_query_head(kv.v_scale, num_heads, dtype)
    packed = found.transpose(1, 2).reshape(num_rows * num_q, num_heads, -1)
    # Padding repeats a row's last query, so it is written twice with equal values.
    if tokens is None:
        out.narrow(0, bundle.first, num_rows * num_q).copy_(packed)
    else:
        out.index_copy_(0, tokens, packed.to(out.dtype))
    if lse is not None and found_lse is not None:
        packed_lse = found_lse.transpose(1, 2).reshape(num_rows * num_q, num_heads)
        at = torch.arange(bundle.first, bundle.first + num_rows * num_q) if tokens is None else tokens
        lse.index_copy_(0, at, packed_lse)


def _attend_few(bundle: Bundle, keys: Keys, q: Tensor, runs: Runs, scale: float, out: Tensor) -> None:
    """The same for rows of one query that `Keys.are_few` of."""
    num_rows, first = bundle.num_rows, bundle.first
    if num_rows < out.shape[0]:
        q, out = q.narrow(0, first, num_rows), out.narrow(0, first, num_rows)
    with cpu_products.OneThread():
        gathered = _gather(runs, keys, num_rows)
        found = cpu_products.attend_few(q, gathered, keys.num_keys, scale, keys.visible)
    out.view(found.shape).copy_(found)


def _computed_in(q: Tensor, kv: KvLayer) -> torch.dtype:
    """The dtype of a call: the keys' own, the queries' where keys are fp8."""
    return kv.k.dtype if kv.k_scale is None else q.dtype


def _per_query_head(scale: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """A scale of each KV head [Hkv] for [R, Hq, Q, D]."""
    return scale.repeat_interleave(num_heads // scale.numel()).to(dtype)[:, None, None]


def _gather(runs: Runs, keys: Keys, num_rows: int) -> Tensor:
    """Keys and values, [2, R, Hkv, blocks * block_size, D]: whole (block, head) runs at a time."""
    _, num_kv_heads, _, dim = runs.kv.k.shape
    if len(runs.blocks) == 1:
        found = runs.blocks[0].index_select(0, keys.index)
    else:
        index = keys.index[: keys.index.numel() // 2]
        found = torch.cat([blocks.index_select(0, index) for blocks in runs.blocks])
    return found.view(2, num_rows, num_kv_heads, -1, dim)


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, keys: Keys, spec: AttnSpec) -> Tensor:
    """q [R, Hq, Q, D], k and v [R, Hkv, K, D]: [R, Hq, Q, D], by products or by torch's own attention."""
    num_rows, _, num_q, dim = q.shape
    if cpu_products.are_faster(q, k.shape[2]):
        is_causal = spec.causal and num_rows == 1
        added = None if is_causal and spec.window is None else keys.visible
        return cpu_products.attend(q, k, v, spec.scale, added, is_causal)
    if num_q == 1:
        folded = q.reshape(num_rows, k.shape[1], -1, dim)
        return scaled_dot_product_attention(folded, k, v, attn_mask=keys.visible, scale=spec.scale).reshape(q.shape)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=keys.visible, is_causal=keys.is_causal, scale=spec.scale, enable_gqa=True
    )


def _attend_written(q: Tensor, k: Tensor, v: Tensor, keys: Keys, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """The same with scores written out: (out [R, Hq, Q, D], lse [R, Hq, Q])."""
    num_rows, num_heads, num_q, dim = q.shape
    num_kv_heads, visible = k.shape[1], keys.visible
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


def _is_plain(spec: AttnSpec) -> bool:
    """Whether nothing but a mask is asked for: torch's own attention computes it too."""
    return spec.softcap is None and spec.sinks is None and not spec.want_lse
