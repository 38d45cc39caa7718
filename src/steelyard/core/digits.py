"""A number as a person reads it in a table: four digits of it, and never a power of ten. Units are the caller's."""

from __future__ import annotations

import math


def in_digits(value: float) -> str:
    """15,800 and 12.34 and 0.0421, whole from a thousand on; 0.0000 is what rounds to it, and 0 what is none."""
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-4:
        return f"{value:.4f}"
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:.4g}"
