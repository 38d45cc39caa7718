"""Rotary scaling out of a GGUF: metadata keys, and factor tensors that stand for a rule nobody wrote down."""

from __future__ import annotations

import math
import struct
from typing import Any

from steelyard.checkpoint.gguf_header import Header
from steelyard.errors import CheckpointError

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def rope_scaling(header: Header, head_dim: int) -> dict[str, Any] | None:
    """The `rope_scaling` of a config.json, or None. Raises CheckpointError for a rule of unknown name."""
    rotary_dim = header.get("rope.dimension_count", int, head_dim)
    if "rope_freqs.weight" in header.tensors:
        return _from_factors(header, rotary_dim)
    if "rope_factors_long.weight" in header.tensors:
        return _longrope(header, rotary_dim)
    rule = header.get("rope.scaling.type", str, "none")
    if rule == "none":
        legacy = header.get("rope.scale_linear", float, 1.0)
        return None if legacy == 1.0 else {"rope_type": "linear", "factor": legacy}
    if rule not in ("linear", "yarn"):
        raise CheckpointError(f"{header.path}: rotary scaling '{rule}' is not supported")
    scaling: dict[str, Any] = {"rope_type": rule, "factor": header.get("rope.scaling.factor", float)}
    if rule == "yarn":
        scaling["original_max_position_embeddings"] = header.get("rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            value = header.get(f"rope.scaling.yarn_{name}", float, None)
            if value is not None:
                scaling[name] = value
    return scaling


def _from_factors(header: Header, rotary_dim: int) -> dict[str, Any]:
    """Factors that divide the frequencies. Where they are what Llama 3's rule gives, that rule; else themselves."""
    factors = _read_factors(header, "rope_freqs.weight", rotary_dim)
    factor = round(factors[-1], 4)
    rule = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
    theta = header.get("rope.freq_base", float, 10000.0)
    expected = [_llama3_factor(theta ** (-2 * i / rotary_dim), factor) for i in range(rotary_dim // 2)]
    if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
        return rule
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": header.get("context_length"),
    }


def _llama3_factor(frequency: float, factor: float) -> float:
    """By what Llama 3.1's rule divides a frequency: 1 for short waves, `factor` for long ones, smooth between."""
    turns = _LLAMA3_CONTEXT * frequency / (2 * math.pi)
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    smooth = min(1.0, max(0.0, smooth))
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _longrope(header: Header, rotary_dim: int) -> dict[str, Any]:
    scaling = {
        "rope_type": "longrope",
        "short_factor": _read_factors(header, "rope_factors_short.weight", rotary_dim),
        "long_factor": _read_factors(header, "rope_factors_long.weight", rotary_dim),
        "original_max_position_embeddings": header.get("rope.scaling.original_context_length"),
    }
    attention_factor = header.get("rope.scaling.attn_factor", float, None)
    if attention_factor is not None:
        scaling["attention_factor"] = attention_factor
    return scaling


def _read_factors(header: Header, name: str, rotary_dim: int) -> list[float]:
    """The only tensors read here: half a head of float32 each."""
    if name not in header.tensors:
        raise CheckpointError(f"{header.path}: tensor '{name}' is missing")
    path, tensor = header.tensors[name]
    if tensor.kind != "F32" or tensor.shape != (rotary_dim // 2,):
        raise CheckpointError(
            f"{path}: tensor '{name}' is {tensor.kind} of shape {list(tensor.shape)}, not F32 of {rotary_dim // 2}"
        )
    with path.open("rb") as file:
        file.seek(tensor.offset)
        raw = file.read(tensor.nbytes)
    factors = list(struct.unpack(f"<{rotary_dim // 2}f", raw))
    if not all(math.isfinite(f) and f > 0 for f in factors):
        raise CheckpointError(f"{path}: tensor '{name}' has factors that are not positive numbers")
    return factors
