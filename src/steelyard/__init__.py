"""Steelyard: an LLM inference server that is fast and weighs what it spends.

Importing this package loads nothing heavy; `LLM`, `SamplingParams` and `StructuredOutputs` load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]

if TYPE_CHECKING:
    from steelyard.core.sampling import SamplingParams, StructuredOutputs
    from steelyard.llm import LLM


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from steelyard.llm import LLM

        return LLM
    if name == "SamplingParams":
        from steelyard.core.sampling import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from steelyard.core.sampling import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module 'steelyard' has no attribute {name!r}")
