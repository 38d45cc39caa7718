"""The scales of an fp8 KV cache: the checkpoint's own, or what a short calibration at start finds. No kernel here.

    checkpoint    layers.N.self_attn[.k_proj].k_scale, the same for v      one number a layer, for all its heads
    calibration   random tokens through the whole model into a small pool of the model's own dtype, then the largest
                  magnitude of each head in that pool                      one power of two a KV head

A key's scale is for keys as an fp8 pool holds them, in its Hadamard basis (kernels/kv_fp8.py).

The same weights, dtype and limits give the same scales, so blocks made before a restart mean the same after it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from steelyard.checkpoint.entry import Checkpoint
from steelyard.errors import CheckpointError
from steelyard.kernels.attention import Batch, KvLayer
from steelyard.kernels.kv_fp8 import hadamard, key_growth, scale_for
from steelyard.layers.batch import StepBatch
from steelyard.layers.linear import Target
from steelyard.models.decoder import Decoder
from steelyard.models.load import copy_tensor, map_file, text_name
from steelyard.runner.kv import KvPool
from steelyard.runner.options import Limits

NUM_PROMPTS = 8
PROMPT_LEN = 128
SEED = 20231

Scales: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""Of each layer, (K, V): float32 [Hkv]."""

_NAME = re.compile(r"layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")
_log = logging.getLogger(__name__)


@torch.inference_mode()
def kv_scales(decoder: Decoder, checkpoint: Checkpoint, limits: Limits, max_tokens: int) -> Scales:
    """Scales for every layer; says where they come from.

    `max_tokens`: of one forward. Raises CheckpointError where a checkpoint has scales for some layers only, or one
    that is not a positive number.
    """
    own = stored_scales(decoder, checkpoint)
    if own is not None:
        _log.info("fp8 KV cache: scales of the checkpoint, one a layer for K and one for V")
        return own
    scales, num_tokens = calibrated(decoder, limits, max_tokens)
    _log.info(
        "fp8 KV cache: the checkpoint has no scales; one a KV head, K %s and V %s, from %d random tokens",
        *(_span([k for k, _ in scales]), _span([v for _, v in scales]), num_tokens),
    )
    return scales


def stored_scales(decoder: Decoder, checkpoint: Checkpoint) -> Scales | None:
    """The checkpoint's scales, the same for all heads of a layer; None where it has none.

    They fit keys that nobody has turned (the largest magnitude over 448), and a turned key can hold larger numbers, so
    a key's gets that much room: none is clipped that would not have been. As a power of two it costs no precision, for
    e4m3 keeps one part in 16 from 448 down to 2^-6.
    """
    found: dict[tuple[int, str], float] = {}
    files: dict[Path, Tensor] = {}
    for name, entry in checkpoint.tensors.items():
        match = _NAME.search(text_name(name))
        if match is None:
            continue
        value = torch.zeros(entry.shape)
        if entry.file not in files:
            files[entry.file] = map_file(entry.file)
        copy_tensor(entry, files[entry.file], Target(value))
        if value.numel() != 1 or not 0 < float(value) < torch.inf:
            raise CheckpointError(f"tensor {entry.source_name}: a KV scale is one number above 0, not {value.tolist()}")
        found[int(match[1]), match[2]] = float(value)
    if not found:
        return None
    scales: list[tuple[Tensor, Tensor]] = []
    for index, layer in enumerate(decoder.config.layers):
        if (index, "k") not in found or (index, "v") not in found:
            raise CheckpointError(f"the checkpoint holds KV scales, but not both of layer {index}")
        shape, device = (layer.num_kv_heads,), decoder.place.device
        k, v = (torch.full(shape, found[index, which], device=device) for which in "kv")
        scales.append((k * key_growth(layer.head_dim), v))
    return tuple(scales)


def calibrated(decoder: Decoder, limits: Limits, max_tokens: int) -> tuple[Scales, int]:
    """(scales, tokens computed): the largest magnitude of each head over random prompts from position 0 on."""
    config, place = decoder.config, decoder.place
    length = min(PROMPT_LEN, max_tokens, limits.max_model_len)
    num_blocks = -(-length // limits.block_size)
    like = torch.empty(0, dtype=place.kv_dtype, device=place.device)
    pool = KvPool(config, [num_blocks] * len(config.windows), limits.block_size, like)
    generator = torch.Generator().manual_seed(SEED)
    largest: list[list[Tensor]] = [[torch.zeros(()), torch.zeros(())] for _ in config.layers]
    for _ in range(NUM_PROMPTS):
        ids = torch.randint(config.vocab_size, (length,), generator=generator)
        decoder.forward(_prompt(ids.to(place.device), num_blocks, len(config.windows), pool.layers))
        for seen, layer in zip(largest, pool.layers):
            for which, held in enumerate((hadamard(layer.k), layer.v.float())):
                seen[which] = torch.maximum(seen[which].to(held.device), held.abs().amax(dim=(0, 2, 3)))
    return tuple((scale_for(k), scale_for(v)) for k, v in largest), NUM_PROMPTS * length


def _prompt(ids: Tensor, num_blocks: int, num_groups: int, kv: tuple[KvLayer, ...]) -> StepBatch:
    """A step of one fresh row in blocks 1, 2, ..."""
    length, device = ids.numel(), ids.device
    positions = torch.arange(length, device=device)
    table = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None]
    batch = Batch(
        positions=positions,
        slots=(positions + kv[0].block_size,) * num_groups,
        q_start=torch.tensor([0, length], dtype=torch.int32, device=device),
        ctx_len=torch.tensor([length], dtype=torch.int32, device=device),
        tables=(table,) * num_groups,
        num_tokens=length,
        num_decode=0,
        max_q=length,
        max_ctx=length,
    )
    return StepBatch(ids, batch, kv)


def _span(scales: Sequence[Tensor]) -> str:
    low, high = min(float(s.min()) for s in scales), max(float(s.max()) for s in scales)
    return f"{low:g} to {high:g}"
