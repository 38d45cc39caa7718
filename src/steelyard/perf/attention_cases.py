"""One attention problem: its shapes, its arithmetic, and the bytes it must and need not move. Nothing is run here.

Bytes of one layer's forward, b bytes an element, H query heads, Hk KV heads, N queries, K keys, D head size:

    least   b D (2 H N + 2 Hk K)                                 each input read once, the output written once
    naive   b H (4 N K) + b D H (2 N + 2 K)                      S and P each written and read: 4BN^2 + 4BND a head
    tiled   b D (2 H N + 2 H K ceil(N / tile))                   no S, no P; K and V read again for each tile of queries

With tile ~ M / D for M elements of on-chip memory, tiled is the paper's N^2 D^2 / M (Dao et al. 2022, Theorem 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

QUERY_TILE = 128


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`batch` sequences of `num_q` new tokens that end at `num_k` keys. num_q == 1 is a decode step."""

    batch: int
    num_q: int
    num_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        return "decode" if self.num_q == 1 else "prefill"

    def flops(self, backward: bool = False) -> float:
        """Two products forward; five backward (scores again, dV, dP, dQ, dK), whatever a kernel recomputes.

        Causal halves the square: N K - N^2 / 2, as the literature counts.
        """
        pairs = self.num_q * self.num_k - (self.num_q**2 / 2 if self.causal and self.num_q > 1 else 0)
        return (10 if backward else 4) * self.batch * self.num_heads * self.head_dim * pairs

    @property
    def least_bytes(self) -> int:
        per_sequence = 2 * self.num_heads * self.num_q + 2 * self.num_kv_heads * self.num_k
        return self.batch * self.dtype.itemsize * self.head_dim * per_sequence

    @property
    def naive_bytes(self) -> int:
        scores = 4 * self.num_q * self.num_k
        operands = self.head_dim * (2 * self.num_q + 2 * self.num_k)
        return self.batch * self.num_heads * self.dtype.itemsize * (scores + operands)

    @property
    def tiled_bytes(self) -> int:
        """Tiles of 128 queries; a causal tile reads the keys up to its end. Decode packs a KV head's queries."""
        if self.num_q == 1:
            return self.least_bytes
        ends = [min(start + QUERY_TILE, self.num_q) for start in range(0, self.num_q, QUERY_TILE)]
        offset = self.num_k - self.num_q
        keys = sum(end + offset for end in ends) if self.causal else self.num_k * math.ceil(self.num_q / QUERY_TILE)
        per_head = self.head_dim * (2 * self.num_q + 2 * keys)
        return self.batch * self.num_heads * self.dtype.itemsize * per_head

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"
        return f"{self.kind} {self.batch}x{self.num_q}:{self.num_k} heads {heads} {mask}"
