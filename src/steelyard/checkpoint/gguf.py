"""Reads the header of a GGUF file: metadata and the table of tensors. Knows no model and reads no weights.

The format (version 2 and 3, little-endian; github.com/ggml-org/ggml, docs/gguf.md):

    "GGUF" version:u32 num_tensors:u64 num_pairs:u64
    pairs:    key:string type:u32 value                     string = length:u64 bytes
    tensors:  name:string num_dims:u32 dims:u64* kind:u32 offset:u64     dims fastest first
    padding up to general.alignment, then the data; offsets count from here

A file is hostile until read: each count is checked against the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import CheckpointError

MAGIC = b"GGUF"
MAX_DIMS = 4

# kind -> (values a block, bytes a block)
BLOCK_BYTES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
_KIND_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MIN_STRING_BYTES, _MIN_PAIR_BYTES, _MIN_TENSOR_BYTES = 8, 13, 24


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A row of the table, checked to lie inside the file. `shape` is in torch order, `offset` absolute."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: list[GgufTensor]


class _Cursor:
    """A position in the mapped file; every read checks the bytes that are left."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.end = data, path, 0, len(data)

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged GGUF file: {what}")

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        if self.at + size > self.end:
            raise self.fail(f"it ends inside {what}")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def count(self, min_bytes_each: int, what: str) -> int:
        """A number of things to come, each at least so many bytes long."""
        value = self.scalar("Q", what)
        if value * min_bytes_each > self.end - self.at:
            raise self.fail(f"{what} announces {value} entries, more than the file can hold")
        return int(value)

    def string(self, what: str) -> str:
        length = self.count(1, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def array(self, what: str) -> list[Any]:
        kind = self.scalar("I", what)
        if kind == _STRING:
            return self._strings(self.count(_MIN_STRING_BYTES, what), what)
        if kind not in _SCALARS:
            raise self.fail(f"{what} is an array of unknown type {kind}")
        code = _SCALARS[kind]
        num = self.count(struct.calcsize("<" + code), what)
        values = struct.unpack_from(f"<{num}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{num}{code}")
        return list(values)

    def _strings(self, num: int, what: str) -> list[str]:
        """The loop over a vocabulary: 10^5 strings, so nothing is called per string that need not be."""
        data, at, end = self.data, self.at, self.end
        length_at = struct.Struct("<Q").unpack_from
        out: list[str] = []
        try:
            for _ in range(num):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    raise self.fail(f"it ends inside entry {len(out)} of {what}")
                out.append(data[start:at].decode())
        except struct.error:
            raise self.fail(f"it ends inside entry {len(out)} of {what}") from None
        except UnicodeDecodeError:
            raise self.fail(f"entry {len(out)} of {what} is not UTF-8") from None
        self.at = at
        return out

    def value(self, what: str) -> Any:
        kind = self.scalar("I", what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has unknown type {kind}")
        return self.scalar(_SCALARS[kind], what)


def read_gguf(path: Path) -> GgufFile:
    """Reads metadata and tensor table. Raises CheckpointError, naming file and tensor or key, on any fault."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data, path))
    except ValueError as error:  # mmap of an empty file
        raise CheckpointError(f"{path}: damaged GGUF file: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _read(cursor: _Cursor) -> GgufFile:
    if cursor.data[:4] != MAGIC:
        raise CheckpointError(f"{cursor.path}: not a GGUF file (it does not begin with 'GGUF')")
    cursor.at = 4
    version = cursor.scalar("I", "the version")
    if version not in (2, 3):
        endian = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(f"{cursor.path}: GGUF version {version} is not supported{endian}, only 2 and 3")
    num_tensors = cursor.count(_MIN_TENSOR_BYTES, "the number of tensors")
    num_pairs = cursor.count(_MIN_PAIR_BYTES, "the number of metadata keys")
    metadata: dict[str, Any] = {}
    for i in range(num_pairs):
        key = cursor.string(f"metadata key {i}")
        if key in metadata:
            raise cursor.fail(f"metadata key '{key}' appears twice")
        metadata[key] = cursor.value(f"metadata '{key}'")
    rows = [_tensor_row(cursor, i) for i in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    base = -(-cursor.at // alignment) * alignment
    tensors = [GgufTensor(r.name, r.kind, r.shape, base + r.offset, r.nbytes) for r in rows]
    _check_places(cursor, tensors, alignment)
    return GgufFile(cursor.path, metadata, tensors)


def _tensor_row(cursor: _Cursor, index: int) -> GgufTensor:
    """One row of the table, its offset still relative to the data."""
    name = cursor.string(f"the name of tensor {index}")
    what = f"tensor '{name}'"
    num_dims = cursor.scalar("I", what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"{what} has {num_dims} dimensions, not 1 to {MAX_DIMS}")
    shape = tuple(cursor.scalar("Q", what) for _ in range(num_dims))[::-1]
    kind_id = cursor.scalar("I", what)
    offset = cursor.scalar("Q", what)
    kind = _KIND_NAMES.get(kind_id, f"number {kind_id}")
    if kind not in BLOCK_BYTES:
        supported = ", ".join(BLOCK_BYTES)
        raise CheckpointError(f"{cursor.path}: {what} is stored as {kind}, which is not supported, only {supported}")
    block_len, block_bytes = BLOCK_BYTES[kind]
    num_values = 1
    for dim in shape:
        num_values *= dim
    if num_values == 0 or shape[-1] % block_len:
        raise cursor.fail(f"{what} of shape {list(shape)} does not fill whole {kind} blocks of {block_len}")
    return GgufTensor(name, kind, shape, offset, num_values // block_len * block_bytes)


def _check_places(cursor: _Cursor, tensors: list[GgufTensor], alignment: int) -> None:
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise cursor.fail(f"tensor '{tensor.name}' appears twice")
        names.add(tensor.name)
        if tensor.offset % alignment:
            raise cursor.fail(f"tensor '{tensor.name}' is not aligned to {alignment} bytes")
        if tensor.offset + tensor.nbytes > cursor.end:
            raise CheckpointError(
                f"{cursor.path}: cut short: tensor '{tensor.name}' needs bytes up to "
                f"{tensor.offset + tensor.nbytes}, the file has {cursor.end}"
            )
    ordered = sorted(tensors, key=lambda t: t.offset)
    for left, right in itertools.pairwise(ordered):
        if left.offset + left.nbytes > right.offset:
            raise cursor.fail(f"tensors '{left.name}' and '{right.name}' overlap")
