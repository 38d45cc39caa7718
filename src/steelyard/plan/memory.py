"""Where a device's memory goes, and how many KV blocks and sequences fit. Integer arithmetic, exact both ways.

    total
    |- not ours            (1 - share) * total
    |- context             driver, libraries, allocator
    |- weights
    |- activation peak     the largest step's temporaries
    |- graphs              captured graphs' private memory
    |- communication       buffers between ranks
    `- KV pool             what is left, in whole blocks, one of each group the null block

Each KV group (layers that share a window) has a pool of its own; pools grow together, in the proportion in which
one sequence of the expected length uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.step import KvGroup
from steelyard.errors import StartError
from steelyard.plan.shape import ModelShape

GIB = 2**30
MIB = 2**20


def kv_block_bytes(shape: ModelShape, block_size: int, dtype_bytes: int = 2, *, group: int = 0, tp: int = 1) -> int:
    """Bytes of one block of `block_size` token slots in a KV group, all the group's layers, on one rank."""
    layers = shape.group_layers()[group]
    elements = sum(shape.layers[i].attention.kv_elements_per_token(tp) for i in layers)
    return block_size * dtype_bytes * elements


def blocks_per_sequence(groups: tuple[KvGroup, ...], block_size: int, context_len: int) -> tuple[int, ...]:
    """Blocks of each group that a sequence of `context_len` tokens holds at most.

    Behind a window blocks are freed, those of the first kept positions aside; a window may lie across one block more
    than it fills.
    """
    whole = -(-context_len // block_size)
    kept = [-(-g.keep_first // block_size) for g in groups]
    return tuple(
        whole if g.window is None else min(whole, first + -(-(g.window - 1) // block_size) + 1)
        for g, first in zip(groups, kept)
    )


@dataclass(frozen=True, slots=True)
class KvPools:
    """The sizes KV pools can have: `scale` counts the blocks of the group that a sequence uses most.

    block_bytes  bytes of a block, by group
    ratio        blocks of each group that one sequence of the expected length holds
    least        blocks of each group before any group has more; empty: none, all grow in proportion
    """

    block_size: int
    block_bytes: tuple[int, ...]
    ratio: tuple[int, ...]
    groups: tuple[KvGroup, ...]
    least: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, shape: ModelShape, block_size: int, dtype_bytes: int = 2, *, expected_len: int = 4096, tp: int = 1
    ) -> KvPools:
        """Pools for a model. `expected_len` matters only where groups differ: it sets their proportion."""
        groups = shape.kv_groups()
        sizes = [kv_block_bytes(shape, block_size, dtype_bytes, group=g, tp=tp) for g in range(len(groups))]
        return cls(block_size, tuple(sizes), blocks_per_sequence(groups, block_size, expected_len), groups)

    def blocks_at(self, scale: int) -> tuple[int, ...]:
        """Usable blocks of each group at a scale; none is ever smaller than its share rounded up."""
        top = max(self.ratio)
        least = self.least or (0,) * len(self.ratio)
        return tuple(max(-(-scale * r // top), min(scale, n)) for r, n in zip(self.ratio, least))

    def bytes_at(self, scale: int) -> int:
        """Bytes of all pools at a scale, the null block of each included."""
        return sum((n + 1) * size for n, size in zip(self.blocks_at(scale), self.block_bytes))

    def fit(self, budget_bytes: int) -> int:
        """The largest scale whose pools fit the budget; 0 where none does. The exact inverse of `bytes_at`:

        fit(bytes_at(n)) == n   and   bytes_at(fit(b)) <= b < bytes_at(fit(b) + 1)   for b >= bytes_at(0)
        """
        if budget_bytes < self.bytes_at(0):
            return 0
        low, high = 0, budget_bytes // min(self.block_bytes) + 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_at(middle) <= budget_bytes else (low, middle - 1)
        assert self.bytes_at(low) <= budget_bytes < self.bytes_at(low + 1)
        return low

    def max_sequences(self, num_blocks: tuple[int, ...], context_len: int) -> int:
        """Whole sequences of `context_len` tokens that the blocks hold at once."""
        needs = blocks_per_sequence(self.groups, self.block_size, context_len)
        return min(have // need for have, need in zip(num_blocks, needs))

    def bytes_for_sequences(self, num_sequences: int, context_len: int) -> int:
        """Bytes of the smallest pools that hold them; the exact inverse of `max_sequences`."""
        needs = blocks_per_sequence(self.groups, self.block_size, context_len)
        return sum((num_sequences * n + 1) * size for n, size in zip(needs, self.block_bytes))

    def sequences_in(self, budget_bytes: int, context_len: int) -> int:
        """Sequences of `context_len` that fit a budget whose pools are cut for just that length."""
        free = budget_bytes - self.bytes_for_sequences(0, context_len)
        each = self.bytes_for_sequences(1, context_len) - self.bytes_for_sequences(0, context_len)
        return max(free // each, 0)

    def longest_in(self, budget_bytes: int) -> int:
        """Tokens of the longest single sequence that fits a budget whose pools are cut for just that length."""
        low, high = 0, budget_bytes // min(self.block_bytes) * self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.bytes_for_sequences(1, middle) <= budget_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return max(low, 0)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One rank's memory by term, in bytes. `share` of the total is ours; the KV pool gets what the terms leave."""

    total_bytes: int
    share: float
    weights_bytes: int
    context_bytes: int = 0
    activation_bytes: int = 0
    graphs_bytes: int = 0
    communication_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        return int(self.total_bytes * self.share)

    @property
    def taken_bytes(self) -> int:
        """Everything but the KV pool."""
        terms = (self.context_bytes, self.weights_bytes, self.activation_bytes, self.graphs_bytes)
        return sum(terms) + self.communication_bytes

    @property
    def kv_bytes(self) -> int:
        """What the KV pool may take; negative where the rest alone does not fit."""
        return self.usable_bytes - self.taken_bytes

    @property
    def reserve_bytes(self) -> int:
        """What is left to others: the share not used."""
        return self.total_bytes - self.usable_bytes

    def terms(self) -> dict[str, int]:
        """Every term by name; they sum to `total_bytes` exactly."""
        return {
            "context": self.context_bytes,
            "weights": self.weights_bytes,
            "activations": self.activation_bytes,
            "graphs": self.graphs_bytes,
            "communication": self.communication_bytes,
            "kv": self.kv_bytes,
            "reserve": self.reserve_bytes,
        }

    def check(self) -> None:
        """Raises StartError with every term where nothing is left for the KV pool."""
        if self.kv_bytes > 0:
            return
        listed = ", ".join(f"{k} {v / GIB:.2f}" for k, v in self.terms().items() if k not in ("kv", "reserve"))
        raise StartError(
            f"the model does not fit: of {self.total_bytes / GIB:.2f} GiB a share of {self.share:g} is "
            f"{self.usable_bytes / GIB:.2f} GiB, and the terms are (GiB) {listed}. Use more devices "
            "(--tensor-parallel-size), a smaller --dtype, or a larger --gpu-memory-utilization",
            param="gpu_memory_utilization",
        )


def activation_peak_bytes(
    shape: ModelShape, num_tokens: int, num_rows: int, dtype_bytes: int = 2, *, tp: int = 1
) -> int:
    """Bytes of temporaries in the largest step: `num_tokens` tokens of which `num_rows` are sampled.

    The larger of two moments: inside an MLP (hidden state, residual, gate and up, their product), and at the head
    (float32 logits of the sampled rows, twice: as computed and as the sampler's working copy). An estimate; the
    runner replaces it by what its warm-up measured.
    """
    hidden = shape.hidden_size
    inner = max(layer.wide_elements(hidden) * 3 // 2 for layer in shape.layers)  # gate and up, and their product
    heads = shape.layers[0].attention
    attention = heads.num_heads * (heads.qk_dim + heads.v_dim) + 2 * heads.num_kv_heads * heads.v_dim
    per_token = 2 * hidden + max(-(-inner // tp), -(-attention // tp))
    logits = num_rows * shape.vocab_size * 4 * 2
    return max(num_tokens * per_token * dtype_bytes, num_tokens * 2 * hidden * dtype_bytes + logits)


def graphs_bytes(num_graphs: int, per_graph_bytes: int = 6 * MIB) -> int:
    """Bytes that captured graphs keep for themselves. An estimate; the runner replaces it by a difference."""
    return num_graphs * per_graph_bytes
