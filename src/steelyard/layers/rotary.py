"""Rotary position tables: frequencies of every scaling scheme, and the table of cosines and sines a model reads.

The table is computed once, in float64, for positions [0, max_model_len); a step gathers its positions' rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Which angles positions get.

    dim      rotated dimensions of a head
    theta    the base of the frequencies
    kind     default, linear, dynamic, yarn, llama3 or longrope; `scaling` has that scheme's own numbers
    context  the model's max_position_embeddings
    """

    dim: int
    theta: float
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()
    context: int = 2048


def rotary_table(config: RopeConfig, max_model_len: int, device: torch.device) -> Tensor:
    """float32 [max_model_len, dim]: cosines of dim / 2 frequencies, then sines, times the scheme's factor.

    Raises CheckpointError for an unknown scheme.
    """
    if config.kind not in SCHEMES:
        known = ", ".join(sorted(SCHEMES))
        raise CheckpointError(f"rope scaling type {config.kind!r} is not supported (known: {known})")
    scaling = dict(config.scaling)
    positions = torch.arange(max_model_len, dtype=torch.float64)
    frequencies, factor = SCHEMES[config.kind](config, scaling, positions)
    angles = positions[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=-1) * factor
    return table.to(device=device, dtype=torch.float32)


def _inverse_frequencies(dim: int, theta: float) -> Tensor:
    # Rounded to float32 as every published implementation does: at position 10^5 the difference shows.
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return (1.0 / theta**exponents).double()


def _default(config: RopeConfig, scaling: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, float]:
    return _inverse_frequencies(config.dim, config.theta), 1.0


def _linear(config: RopeConfig, scaling: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al., 2023)."""
    return _inverse_frequencies(config.dim, config.theta) / float(scaling["factor"]), 1.0


def _dynamic(config: RopeConfig, scaling: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, float]:
    """Dynamic NTK: beyond the trained context the base grows with the length.

    A position gets the base of the sequence that ends with it, so its angle depends on nothing that comes later:
    chunks, cached prefixes and batches agree. (Recomputing a whole prompt at its final length would not.)
    """
    factor, context = float(scaling["factor"]), config.context
    length = torch.clamp(positions + 1, min=context)
    stretch = (factor * length / context) - (factor - 1)
    theta = config.theta * stretch ** (config.dim / (config.dim - 2))
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float64) / config.dim
    return 1.0 / theta[:, None] ** exponents[None, :], 1.0


def _llama3(config: RopeConfig, scaling: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    base = _inverse_frequencies(config.dim, config.theta)
    factor, context = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = context * base / (2 * math.pi)
    kept = torch.clamp((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * base / factor + kept * base, 1.0


def _yarn(config: RopeConfig, scaling: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): interpolate the slow dimensions, keep the fast, ramp between; scale attention."""
    original = float(scaling.get("original_max_position_embeddings") or config.context)
    factor = float(scaling.get("factor") or config.context / original)
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)

    def dimension_of(turns: float) -> float:
        return config.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(fast), dimension_of(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width is a division by zero
    ramp = torch.clamp((torch.arange(config.dim // 2, dtype=torch.float64) - low) / (high - low), 0.0, 1.0)
    base = _inverse_frequencies(config.dim, config.theta)
    return base / factor * ramp + base * (1 - ramp), _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: Mapping[str, Any], factor: float) -> float:
    def grow(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grow(factor, float(scaling["mscale"])) / grow(factor, float(scaling["mscale_all_dim"]))
    return grow(factor, 1.0)


def _longrope(config: RopeConfig, scaling: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., 2024): a factor per dimension, one list for short and one for long contexts.

    The list is chosen once, by the longest sequence this server admits, so cached keys never change their meaning.
    """
    original = float(scaling.get("original_max_position_embeddings") or config.context)
    stretch = float(scaling.get("factor") or config.context / original)
    name = "long_factor" if positions.numel() > original else "short_factor"
    divisors = torch.tensor(scaling[name], dtype=torch.float64)
    base = _inverse_frequencies(config.dim, config.theta)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return base / divisors, float(magnitude)


# (config, its numbers, positions) -> inverse frequencies [dim / 2] or [positions, dim / 2], and the table's factor
Scheme = Callable[[RopeConfig, Mapping[str, Any], Tensor], tuple[Tensor, float]]
SCHEMES: dict[str, Scheme] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
