"""Attention and small operators: one protocol, a plain reference, and fast backends.

Importing this package loads nothing heavy; `flash_attention` (with a gradient, needs Triton) loads on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["flash_attention"]

if TYPE_CHECKING:
    from steelyard.kernels.flash_autograd import flash_attention


def __getattr__(name: str) -> Any:
    if name == "flash_attention":
        return importlib.import_module("steelyard.kernels.flash_autograd").flash_attention
    raise AttributeError(f"module 'steelyard.kernels' has no attribute {name!r}")
