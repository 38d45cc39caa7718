"""Weights into a decoder: from safetensors and GGUF alike (a checkpoint's tensor table), or random ones. Strict.

decoder.targets()  name -> view          nothing missing, nothing left over, every shape equal;
checkpoint.tensors name -> bytes         then each tensor is read, unpacked and copied into its view
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from steelyard.checkpoint.entry import Checkpoint, TensorEntry
from steelyard.errors import CheckpointError, reason
from steelyard.layers.linear import Stored, Target
from steelyard.models.decoder import Decoder
from steelyard.models.families import family_of
from steelyard.models.quant import FORMATS, LEVELS, dequantize, levels
from steelyard.plan.shape import ModelShape

PLAIN_KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK_ELEMENTS = 2**24
UNPACKED_ELEMENTS = 2**18  # unpacking takes several passes: a chunk of this size stays in a core's cache
NEVER_NEEDED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
KV_SCALES = (".k_scale", ".v_scale")
"""Of an fp8 KV cache, which reads them by itself (runner/kv_scales.py); no weights."""
DUMMY_STD = 0.02


def load_weights(
    decoder: Decoder, checkpoint: Checkpoint, packing: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    """Fill every weight of `decoder` from `checkpoint`, and let it pack them, within `packing` for who takes the time.

    Raises CheckpointError naming the tensor that is missing, unknown, cut short, or of another shape or kind. All
    names and shapes are checked before the first byte is copied.
    """
    targets = decoder.targets()
    entries = _needed(checkpoint, decoder)
    check_complete(targets, entries)
    for name, entry in entries.items():
        if tuple(targets[name].view.shape) != entry.shape:
            raise CheckpointError(
                f"tensor {entry.source_name}: the file holds shape {list(entry.shape)}, the config asks for "
                f"{list(targets[name].view.shape)}"
            )
        if entry.kind not in PLAIN_KINDS and entry.kind not in FORMATS:
            known = ", ".join([*PLAIN_KINDS, *FORMATS])
            raise CheckpointError(f"tensor {entry.source_name}: kind {entry.kind} cannot be read (can be: {known})")
    files: dict[Path, Tensor] = {}
    for name, entry in entries.items():
        if entry.file not in files:
            files[entry.file] = map_file(entry.file)
        copy_tensor(entry, files[entry.file], targets[name])
    del targets  # packing gives back each weight whose other forms it has made
    with packing():
        decoder.pack({name: _stored(entry, files[entry.file]) for name, entry in entries.items()})


def _stored(entry: TensorEntry, data: Tensor) -> Stored:
    """What a backend may want to know of a tensor to pack it."""

    def read() -> tuple[Tensor, Tensor, Tensor]:
        parts = levels(data[entry.offset : entry.offset + entry.nbytes], entry.kind, entry.shape)
        if entry.permuted_heads is None:
            return parts
        quants, step, low = (unpermute(part, entry.permuted_heads) for part in parts)
        return quants, step, low

    if entry.kind not in LEVELS or len(entry.shape) != 2:
        return Stored(entry.kind)
    return Stored(entry.kind, LEVELS[entry.kind].bits, read)


def check_complete(targets: Mapping[str, Target], entries: Mapping[str, TensorEntry]) -> None:
    """Raises CheckpointError unless both have the same names."""
    missing = sorted(targets.keys() - entries.keys())
    if missing:
        raise CheckpointError(f"the checkpoint lacks tensor {missing[0]}{_and_more(missing)} that its config asks for")
    unknown = sorted(entries.keys() - targets.keys())
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds tensor {unknown[0]}{_and_more(unknown)} that its config has no place for"
        )


def dummy_weights(decoder: Decoder, seed: int) -> None:
    """Random weights made on the device: matrices and biases normal with deviation 0.02, norms one."""
    generator = torch.Generator(device=decoder.place.device).manual_seed(seed)
    for name, target in decoder.targets().items():
        if target.view.dim() == 1 and name.endswith("norm.weight"):
            target.view.fill_(1.0)
        else:
            target.view.normal_(0.0, DUMMY_STD, generator=generator)


def map_file(path: Path) -> Tensor:
    """A file's bytes as a uint8 tensor; pages are read when touched."""
    try:
        with path.open("rb") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}") from error


def copy_tensor(entry: TensorEntry, data: Tensor, target: Target) -> None:
    """Unpack one tensor into its view, some rows at a time so that no second copy of the whole is ever held."""
    end = entry.offset + entry.nbytes
    if end > data.numel():
        raise CheckpointError(
            f"tensor {entry.source_name}: its bytes end at {end:,}, {entry.file} has {data.numel():,}: cut short"
        )
    view, packed = target.view, data[entry.offset : end]
    rows = entry.shape[0] if entry.shape else 1
    per_row = max(view.numel() // rows, 1)
    expected = _packed_bytes(entry.kind, view.numel())
    if entry.nbytes != expected:
        raise CheckpointError(
            f"tensor {entry.source_name}: {entry.nbytes:,} bytes for shape {list(entry.shape)} of {entry.kind}, "
            f"which takes {expected:,}"
        )
    whole = rows // (entry.permuted_heads or rows)  # rows that move among themselves
    at_once = whole * max((UNPACKED_ELEMENTS if entry.kind in FORMATS else CHUNK_ELEMENTS) // (per_row * whole), 1)
    offset = target.offset - entry.added
    for first in range(0, rows, at_once):
        some = view[first : first + at_once] if view.dim() else view
        piece = packed[first * (entry.nbytes // rows) :][: some.numel() // per_row * (entry.nbytes // rows)]
        values = _unpack(piece, entry.kind, tuple(some.shape))
        if entry.permuted_heads:
            values = unpermute(values, some.shape[0] // whole)
        some.copy_(values if offset == 0.0 else values.to(torch.promote_types(some.dtype, torch.float32)) + offset)


def unpermute(values: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from interleaved rotary pairs (0, D/2, 1, D/2 + 1, ...) back to halves (0, 1, ...)."""
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def _needed(checkpoint: Checkpoint, decoder: Decoder) -> dict[str, TensorEntry]:
    """The checkpoint's tensors by our names, without those known to be of no use."""
    family = family_of(ModelShape.from_config(dict(checkpoint.config)).decoder.family)
    needed: dict[str, TensorEntry] = {}
    for name, entry in checkpoint.tensors.items():
        if name.endswith(NEVER_NEEDED + KV_SCALES) or name.startswith(family.ignored):
            continue
        own = text_name(name)
        if decoder.config.tied and own == f"{decoder.config.head_name}.weight":
            continue
        needed[own] = entry
    return needed


def text_name(name: str) -> str:
    """The name in a text-only checkpoint of a tensor that a multimodal one keeps under its language model."""
    for prefix, own in (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.", ""),
    ):
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def _unpack(packed: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    if kind in FORMATS:
        return dequantize(packed, kind, shape)
    dtype = PLAIN_KINDS[kind]
    aligned = packed if packed.data_ptr() % dtype.itemsize == 0 else packed.clone()
    return aligned.view(dtype).view(shape)


def _packed_bytes(kind: str, num_elements: int) -> int:
    if kind in FORMATS:
        return num_elements // FORMATS[kind].block_len * FORMATS[kind].block_bytes
    return num_elements * PLAIN_KINDS[kind].itemsize


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
