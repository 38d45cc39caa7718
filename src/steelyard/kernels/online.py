"""Online softmax in NumPy: attention over blocks of keys with O(1) state a row. The mathematics of every fast kernel
here, written to be read and proved; it is not a backend and serves no request.

One row of scores s_1 .. s_n and values v_1 .. v_n is summed up by three quantities over the keys seen so far:

    m = max s_j            l = sum exp(s_j - m)            a = sum exp(s_j - m) v_j            output = a / l

    before          a block of keys [j, j + B)                          after
    (m, l, a)  +    (m_b, l_b, a_b) of the block alone         =        m' = max(m, m_b)
                                                                        l' = l exp(m - m') + l_b exp(m_b - m')
                                                                        a' = a exp(m - m') + a_b exp(m_b - m')

The combination is associative and commutative with (-inf, 0, 0) as its unit, so blocks may be of any size, taken in
any order, or summed up apart and merged: FlashAttention's loop, split-KV decoding and cascades are one operation.
Forgetting exp(m - m') is the classic fault: it is invisible with one block, or whenever the first block holds the
largest score.

Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", Algorithm 3; Dao et al. 2022,
"FlashAttention", Algorithm 1; Dao 2023, "FlashAttention-2", section 3.1 (divide once, at the end).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Visible:
    """Which keys a query sees. With Sq queries and Sk keys, query i stands at position p = i + Sk - Sq.

    causal   keys at positions <= p
    window   keys at positions > p - window; None: all
    """

    causal: bool = False
    window: int | None = None

    def mask(self, num_queries: int, num_keys: int) -> NDArray[np.bool_]:
        """True where query i sees key j: [Sq, Sk]. A row may be False everywhere (Sq > Sk)."""
        position = np.arange(num_queries)[:, None] + (num_keys - num_queries)
        key = np.arange(num_keys)[None, :]
        seen = np.ones((num_queries, num_keys), dtype=bool)
        if self.causal:
            seen &= key <= position
        if self.window is not None:
            seen &= key > position - self.window
        return seen


@dataclass(frozen=True, slots=True)
class Partial:
    """What is known of each row after some of its keys: m [..., Sq], l [..., Sq], a [..., Sq, D].

    A row that has seen no key is (-inf, 0, 0).
    """

    m: Array
    l: Array  # noqa: E741 - the symbol of the papers
    a: Array

    @classmethod
    def nothing(cls, rows: tuple[int, ...], head_dim: int, dtype: np.dtype) -> Partial:
        """The unit of `merge`: no key seen yet."""
        return cls(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((*rows, head_dim), dtype))

    @classmethod
    def of_block(cls, scores: Array, values: Array) -> Partial:
        """One block alone: scores [..., Sq, B] (-inf where masked), values [..., B, D]."""
        m = scores.max(axis=-1, initial=-np.inf)
        weights = np.exp(scores - _finite(m)[..., None])
        return cls(m, weights.sum(axis=-1), weights @ values)

    def merge(self, other: Partial) -> Partial:
        """Both sets of keys together; associative and commutative up to rounding."""
        m = np.maximum(self.m, other.m)
        mine = np.exp(self.m - _finite(m))
        theirs = np.exp(other.m - _finite(m))
        return Partial(
            m,
            self.l * mine + other.l * theirs,
            self.a * mine[..., None] + other.a * theirs[..., None],
        )

    def finish(self) -> tuple[Array, Array]:
        """(output [..., Sq, D], log-sum-exp [..., Sq]); a row without a visible key gives (0, -inf)."""
        seen = self.l > 0
        divisor = np.where(seen, self.l, 1)
        lse = np.where(seen, _finite(self.m) + np.log(divisor), -np.inf).astype(self.l.dtype)
        return self.a / divisor[..., None], lse


def merge_outputs(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Merge finished partial results (output [..., D], log-sum-exp [...]) over disjoint sets of keys.

    A finished part is the partial (lse, 1, output): the same merge, with nothing kept but what a kernel stores.
    """
    first, *rest = [Partial(lse, np.isfinite(lse).astype(lse.dtype), out) for out, lse in parts]
    for part in rest:
        first = first.merge(part)
    return first.finish()


def online_attention(
    q: Array, k: Array, v: Array, block_size: int, *, visible: Visible = Visible(), scale: float | None = None
) -> tuple[Array, Array]:
    """Attention, block by block over the keys: (output [Hq, Sq, D], log-sum-exp [Hq, Sq]).

    q [Hq, Sq, D]; k, v [Hkv, Sk, D] with Hq a multiple of Hkv; one dtype, float32 or float64, which is also the
    accumulator's. The [Sq, Sk] score matrix never exists: a block is Sq x block_size.
    """
    assert block_size >= 1, f"block_size {block_size}"
    group = _group(q, k)
    num_queries, num_keys, head_dim = q.shape[1], k.shape[1], q.shape[2]
    factor = q.dtype.type(head_dim**-0.5 if scale is None else scale)
    mask = visible.mask(num_queries, num_keys)
    state = Partial.nothing(q.shape[:2], v.shape[2], q.dtype)
    for start in range(0, num_keys, block_size):
        block = slice(start, min(start + block_size, num_keys))
        keys, values = (np.repeat(x[:, block], group, axis=0) for x in (k, v))
        scores = np.where(mask[:, block], (q @ keys.swapaxes(-1, -2)) * factor, -np.inf).astype(q.dtype)
        state = state.merge(Partial.of_block(scores, values))
    return state.finish()


def plain_attention(
    q: Array, k: Array, v: Array, *, visible: Visible = Visible(), scale: float | None = None
) -> tuple[Array, Array]:
    """The definition, softmax(scale q k^T) v with the whole score matrix in memory. Shapes as `online_attention`."""
    group = _group(q, k)
    keys, values = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    factor = q.dtype.type(q.shape[2] ** -0.5 if scale is None else scale)
    mask = visible.mask(q.shape[1], k.shape[1])
    scores = np.where(mask, (q @ keys.swapaxes(-1, -2)) * factor, -np.inf)
    top = _finite(scores.max(axis=-1, keepdims=True, initial=-np.inf))
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    seen = total > 0
    divisor = np.where(seen, total, 1)
    lse = np.where(seen, top + np.log(divisor), -np.inf)[..., 0]
    return (weights / divisor) @ values, lse


def _finite(m: Array) -> Array:
    """A maximum fit to subtract: rows that have seen nothing shift by 0, so that -inf - m stays -inf, never NaN."""
    return np.where(np.isneginf(m), np.zeros_like(m), m)


def _group(q: Array, k: Array) -> int:
    assert q.dtype == k.dtype, f"{q.dtype} queries, {k.dtype} keys"
    assert q.shape[0] % k.shape[0] == 0, f"{q.shape[0]} query heads are no multiple of {k.shape[0]} KV heads"
    return q.shape[0] // k.shape[0]
