"""Reads safetensors headers and the index of a sharded checkpoint. Reads no weights.

The format (github.com/huggingface/safetensors): length:u64 of the header, the header as JSON
{name: {"dtype", "shape", "data_offsets": [begin, end]}}, then the data without holes.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from steelyard.checkpoint.entry import TensorEntry
from steelyard.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_UNSUPPORTED_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2", "C64", "U16", "U32", "U64")


def read_directory(directory: Path) -> dict[str, TensorEntry]:
    """All tensors of a directory: those of its index, else of model.safetensors, else of its only *.safetensors.

    Raises CheckpointError where a file is missing or damaged, or index and files disagree.
    """
    index = directory / INDEX
    if index.exists():
        return _read_indexed(index)
    if (directory / SINGLE).exists():
        return read_file(directory / SINGLE)
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return read_file(others[0])
    if others:
        raise CheckpointError(
            f"{directory}: has {len(others)} safetensors files and no {INDEX} to say how they belong together"
        )
    raise CheckpointError(f"{directory}: has no safetensors weights (neither {SINGLE} nor {INDEX}){_other(directory)}")


def _other(directory: Path) -> str:
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if not pickles:
        return ""
    return f"; {pickles[0]} is a pickle, which is not read: convert it to safetensors"


def _read_indexed(index: Path) -> dict[str, TensorEntry]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
        if any(Path(f).name != f for f in files):
            raise ValueError("a file name with a path")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({type(error).__name__}: {error})") from None
    missing = [f for f in files if not (index.parent / f).exists()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(files)} weight files are missing, the first is {missing[0]}"
        )
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_file(index.parent / file).items():
            if name in tensors:
                raise CheckpointError(f"{index.parent}: tensor '{name}' is in {tensors[name].file.name} and {file}")
            tensors[name] = entry
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{index.parent}: tensor '{name}' is in the index and not in {file}")
    return tensors


def read_file(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, each checked to lie inside it without overlap."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            header_len = struct.unpack("<Q", head)[0] if len(head) == 8 else MAX_HEADER_BYTES + 1
            if header_len > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path}: not a safetensors file, or cut short inside its header")
            header = file.read(header_len)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        table = json.loads(header, object_pairs_hook=_no_duplicates)
        if not isinstance(table, dict):
            raise ValueError("the header is not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header: {error}") from None
    table.pop("__metadata__", None)
    base = 8 + header_len
    entries = [_entry(path, name, row, base) for name, row in table.items()]
    _check_places(path, entries, base, size)
    return {e.name: e for e in entries}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name appears twice")
    return out


def _entry(path: Path, name: str, row: Any, base: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError("a size is not a whole number")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor '{name}': damaged header entry ({error})") from None
    if dtype not in _DTYPE_BYTES:
        known = dtype in _UNSUPPORTED_DTYPES
        raise CheckpointError(
            f"{path}: tensor '{name}' is stored as {dtype}, which is {'not supported' if known else 'unknown'}"
        )
    nbytes = math.prod(shape) * _DTYPE_BYTES[dtype]
    if end - begin != nbytes:
        raise CheckpointError(
            f"{path}: tensor '{name}', {dtype} of shape {list(shape)}, needs {nbytes} bytes and has {end - begin}"
        )
    return TensorEntry(name, path, dtype, shape, base + begin, nbytes, name)


def _check_places(path: Path, entries: list[TensorEntry], base: int, size: int) -> None:
    """The data must be covered exactly once: what nobody owns is as suspect as what two own."""
    at = base
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != at:
            fault = "overlaps the one before it" if entry.offset < at else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor '{entry.name}' {fault}")
        at = entry.offset + entry.nbytes
        if at > size:
            raise CheckpointError(
                f"{path}: cut short: tensor '{entry.name}' needs bytes up to {at}, the file has {size}"
            )
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes after the last tensor belong to nothing")
