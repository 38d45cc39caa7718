"""What a runner says it can hold: made in one place, for every device."""

from __future__ import annotations

from steelyard.checkpoint.entry import Checkpoint
from steelyard.core.step import RunnerCaps
from steelyard.models.decoder import Decoder
from steelyard.plan.shape import ModelShape
from steelyard.runner.kv import KvPool, kv_layout
from steelyard.runner.options import Limits


def caps_of(checkpoint: Checkpoint, shape: ModelShape, decoder: Decoder, kv: KvPool, limits: Limits) -> RunnerCaps:
    """Of a decoder over a pool. Guesses are checked where steps do not overlap."""
    held = kv.layers[0].k.dtype
    return RunnerCaps(
        block_size=limits.block_size,
        num_blocks=kv.num_blocks,
        groups=shape.kv_groups(),
        max_rows=limits.max_rows,
        max_model_len=limits.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
        vocab_size=shape.vocab_size,
        overlaps=limits.overlaps,
        checks_drafts=not limits.overlaps,
        fingerprint=checkpoint.fingerprint,
        kv_layout=kv_layout(decoder.place.dtype, held, limits.block_size, decoder.config),
        num_host_blocks=kv.num_host_blocks,
        host_bandwidth=0.0 if kv.host is None else kv.host.bandwidth,
    )
