"""One upload a step: named int32 arrays packed side by side on the host, copied at once, sliced on the device.

host    [ tokens | edits | work | sampling ... ]   one pinned buffer
device  the same bytes; `staged["work"]` is a view
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32Array = NDArray[np.int32]


class Staging:
    """Collects a step's arrays, then uploads them. One object a step."""

    __slots__ = ("_parts", "_places", "_size", "_views")

    def __init__(self) -> None:
        self._parts: list[Int32Array] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._size = 0
        self._views: Tensor | None = None

    def add(self, name: str, values: Int32Array) -> None:
        """Stage a 1-D int32 array under a name of its own."""
        assert values.dtype == np.int32 and name not in self._places, name
        self._parts.append(values)
        self._places[name] = (self._size, self._size + values.size)
        self._size += values.size

    def upload(self, device: torch.device) -> None:
        """Copy all to the device, without waiting for it."""
        packed = np.concatenate(self._parts) if self._parts else np.empty(0, np.int32)
        host = torch.from_numpy(packed)
        self._views = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Tensor:
        """int32 view on the device."""
        assert self._views is not None, "read before upload"
        first, last = self._places[name]
        return self._views[first:last]


def floats(*values: float) -> list[int]:
    """float32 numbers as the int32 words that hold their bits."""
    words: list[int] = np.asarray(values, dtype=np.float32).view(np.int32).tolist()
    return words
