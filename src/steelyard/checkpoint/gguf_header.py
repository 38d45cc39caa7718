"""Typed access to what one model's GGUF file, or files, say about it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.checkpoint.gguf import GgufTensor
from steelyard.errors import CheckpointError

_NO_DEFAULT: Any = object()


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensors of a model's file or files, with typed access to the keys of its architecture."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, tuple[Path, GgufTensor]]

    @property
    def arch(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, kind: type = int, default: Any = _NO_DEFAULT) -> Any:
        """The value of `{arch}.key`, a float rounded to the shortest decimal that float32 tells apart."""
        value = self.metadata.get(f"{self.arch}.{key}")
        if value is None:
            if default is _NO_DEFAULT:
                raise CheckpointError(f"{self.path}: metadata '{self.arch}.{key}' is missing")
            return default
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return shortest(float(value))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.path}: metadata '{self.arch}.{key}' is {value!r}, not {kind.__name__}")
        return value

    def per_layer(self, key: str, num_layers: int, default: list[int] | None = None) -> list[int]:
        """A count that a file gives once, or (pruned models) once a layer."""
        value = self.metadata.get(f"{self.arch}.{key}")
        if isinstance(value, list):
            if len(value) != num_layers or not all(isinstance(v, int) and v >= 0 for v in value):
                raise CheckpointError(f"{self.path}: metadata '{self.arch}.{key}' is not {num_layers} counts")
            return value
        if value is None and default is not None:
            return default
        return [self.get(key)] * num_layers


def shortest(value: float) -> float:
    """The decimal of fewest digits with the same float32: 9.99999975e-06 was written as 1e-05."""
    single = struct.pack("<f", value)
    for digits in range(6, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == single:
            return short
    return value
