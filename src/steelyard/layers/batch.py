"""What a forward is given besides weights: one step's tokens, its attention batch, its KV pool. No computing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from steelyard.kernels.attention import Batch, KvLayer


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T packed tokens of R rows, on the device.

    token_ids  int64 [T]
    attn       positions, slots, tables: see kernels/attention.py
    kv         one KvLayer per decoder layer
    """

    token_ids: Tensor
    attn: Batch
    kv: tuple[KvLayer, ...]
