"""Mixture of experts: pairs (token, expert) sorted by expert on the device, two grouped products, a weighted sum.

    pairs  t * A + a           order    | expert 0's pairs, padded to BM | expert 2's, padded | ...     pad: P
                               experts  | 0      | 0      | 2     | ...   one per block of BM           none: -1

    count_pairs, order_pairs   the tables; pairs of one expert stay in order, so results repeat
    expert_product             hidden [P, F] = act(x W_gate^T) * (x W_up^T), then y [P, K] = (hidden W_down^T) weight
    sum_pairs                  out [T, K]: each token's pairs in order, no atomics

Grids have the most blocks that P pairs can make; surplus programs leave at once: nothing is read on the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from steelyard.kernels.triton_act import ACTIVATIONS, activate
from steelyard.kernels.triton_common import power_of_two

SCAN = 1024


@triton.jit(do_not_specialize=["P"])
def count_pairs(Ids, Counts, P, SCAN: tl.constexpr):
    """Grid (E): pairs of one expert."""
    expert = tl.program_id(0)
    count = tl.zeros([SCAN], tl.int32)
    for at in range(0, P, SCAN):
        i = at + tl.arange(0, SCAN)
        count += (tl.load(Ids + i, mask=i < P, other=-1) == expert).to(tl.int32)
    tl.store(Counts + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["P", "max_blocks"])
def order_pairs(Ids, Counts, Order, Experts, P, E, max_blocks, EB: tl.constexpr, BM: tl.constexpr,
                SCAN: tl.constexpr):  # fmt: skip
    """Grid (E + 1): places one expert's pairs; the program after the last marks the blocks nobody owns."""
    expert = tl.program_id(0)
    e = tl.arange(0, EB)
    blocks = (tl.load(Counts + e, mask=e < E, other=0) + BM - 1) // BM
    first = tl.sum(tl.where(e < expert, blocks, 0), 0)
    if expert == E:
        for block in range(first, max_blocks):
            tl.store(Experts + block, -1)
        return
    own = tl.sum(tl.where(e == expert, blocks, 0), 0)
    placed = 0
    for at in range(0, P, SCAN):
        i = at + tl.arange(0, SCAN)
        mine = (tl.load(Ids + i, mask=i < P, other=-1) == expert).to(tl.int32)
        place = placed + tl.cumsum(mine, 0) - mine
        tl.store(Order + first * BM + place, i, mask=mine == 1)
        placed += tl.sum(mine, 0)
    m = tl.arange(0, BM)
    tl.store(Order + (first + own - 1) * BM + m, P, mask=(own > 0) & ((own - 1) * BM + m >= placed))
    for block in range(first, first + own):
        tl.store(Experts + block, expert)


@triton.jit(do_not_specialize=["P"])
def expert_product(X, W, Y, Order, Experts, Weights, P, N, K: tl.constexpr, A: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ACT: tl.constexpr,
                   WEIGHED: tl.constexpr):  # fmt: skip
    """Grid (ceil(N / BN), blocks): y[pair] = x[pair // A] @ W[expert].T for the pairs of one block.

    ACT >= 0: W [E, 2 N, K] holds gates, then ups, and y = act(gate) * up; else W [E, N, K]. WEIGHED: y is multiplied
    by the pair's weight.
    """
    block = tl.program_id(1)
    expert = tl.load(Experts + block)
    if expert < 0:
        return
    m, n, kk = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    pair = tl.load(Order + block * BM + m)
    live = (pair < P)[:, None]
    x_at = X + (pair // A).to(tl.int64)[:, None] * K + kk[None, :]
    rows: tl.constexpr = 2 if ACT >= 0 else 1
    w_at = W + (expert.to(tl.int64) * rows * N + tl.minimum(n, N - 1))[:, None] * K + kk[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        inside = (k + kk < K)[None, :]
        x = tl.load(x_at + k, mask=live & inside, other=0.0)
        w = tl.load(w_at + k, mask=inside, other=0.0)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if ACT >= 0:
            u = tl.load(w_at + N.to(tl.int64) * K + k, mask=inside, other=0.0)
            up = tl.dot(x, u.T, up, input_precision="ieee")
    if ACT >= 0:
        acc = activate(acc, ACT) * up
    if WEIGHED:
        acc = acc * tl.load(Weights + pair, mask=pair < P, other=0.0).to(tl.float32)[:, None]
    at = Y + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, acc.to(Y.dtype.element_ty), mask=live & (n < N)[None, :])


@triton.jit
def sum_pairs(Y, Out, K, A: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, ceil(K / BLOCK)): out[t] = y[t A] + ... + y[t A + A - 1] in float32."""
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(A):
        total += tl.load(Y + (t * A + a) * K + i, mask=i < K, other=0.0).to(tl.float32)
    tl.store(Out + t * K + i, total.to(Out.dtype.element_ty), mask=i < K)


@dataclass(frozen=True, slots=True)
class Tile:
    """Shapes of one grouped product."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """Few pairs an expert: 16-row tiles, bound by reading weights; many: the widest that keeps two accumulators."""
    per_expert = num_pairs / num_experts
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 2)
    if per_expert <= 16:
        return Tile(16, 64, 128, 4, 4)
    if per_expert <= 96:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 128, 64, 8, 3)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """gate_up [E, 2 F, K] (gates, then ups) and down [E, K, F], contiguous."""

    gate_up: Tensor
    down: Tensor
    activation: str = "silu"


class ExpertLayer:
    """Runs experts over up to max_tokens tokens of top_k experts each; scratch is allocated once, for all layers."""

    def __init__(self, weights_like: ExpertWeights, max_tokens: int, top_k: int) -> None:
        num_experts, twice, hidden = weights_like.gate_up.shape
        dtype, device = weights_like.gate_up.dtype, weights_like.gate_up.device
        self._top_k, self._num_experts = top_k, num_experts
        pairs = max_tokens * top_k
        blocks = -(-pairs // 16) + num_experts
        self._counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
        self._order = torch.zeros(pairs + 128 * num_experts, dtype=torch.int32, device=device)
        self._experts = torch.zeros(blocks, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(pairs, twice // 2, dtype=dtype, device=device)
        self._y = torch.zeros(pairs, hidden, dtype=dtype, device=device)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, out: Tensor) -> Tensor:
        """out[t] = sum over a of weights[t, a] expert[ids[t, a]](x[t]); x, out [T, K], ids int32 and weights [T, A]."""
        num_tokens, k = x.shape
        pairs, f = num_tokens * self._top_k, experts.down.shape[2]
        assert ids.shape == weights.shape == (num_tokens, self._top_k) and pairs <= self._hidden.shape[0]
        assert x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous() and out.is_contiguous()
        tile = tile_for(pairs, self._num_experts, x.dtype)
        blocks = min(-(-pairs // tile.rows) + self._num_experts, pairs)
        count_pairs[(self._num_experts,)](ids, self._counts, pairs, SCAN=SCAN, num_warps=4)
        order_pairs[(self._num_experts + 1,)](
            ids, self._counts, self._order, self._experts, pairs, self._num_experts, blocks,
            EB=power_of_two(self._num_experts), BM=tile.rows, SCAN=SCAN, num_warps=4,
        )  # fmt: skip
        shapes = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "STAGES": tile.stages}
        narrow = {**shapes, "BN": max(16, tile.columns // 2)} if tile.rows == 128 else shapes
        expert_product[(-(-f // narrow["BN"]), blocks)](
            x, experts.gate_up, self._hidden, self._order, self._experts, weights, pairs, f, K=k, A=self._top_k,
            **narrow, ACT=ACTIVATIONS[experts.activation], WEIGHED=False, num_warps=tile.warps,
        )  # fmt: skip
        expert_product[(-(-k // tile.columns), blocks)](
            self._hidden, experts.down, self._y, self._order, self._experts, weights, pairs, k, K=f, A=1, **shapes,
            ACT=-1, WEIGHED=True, num_warps=tile.warps,
        )  # fmt: skip
        sum_pairs[(num_tokens, -(-k // 1024))](self._y, out, k, A=self._top_k, BLOCK=1024, num_warps=4)
        return out
