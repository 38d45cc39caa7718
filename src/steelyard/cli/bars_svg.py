"""Horizontal bars as SVG text: amounts side by side, and signed parts of a difference. Knows not what they are."""

from __future__ import annotations

import html
from collections.abc import Sequence

from steelyard.core.digits import in_digits

WIDTH = 720
_NAMES, _VALUES, _ROW = 250, 90, 26


def bars(rows: Sequence[tuple[str, float, str]], label: str, unit: str) -> str:
    """A bar a row (name, amount >= 0, css class), all to one scale."""
    most = max((amount for _, amount, _ in rows), default=0.0) or 1.0
    scale = (WIDTH - _NAMES - _VALUES) / most
    parts = [_open(len(rows), label)]
    for i, (name, amount, css) in enumerate(rows):
        width = max(amount * scale, 1.0)
        parts += _row(i, name, (_NAMES, width, css), (_NAMES + width + 6, "start"), f"{in_digits(amount)} {unit}")
    return "\n".join([*parts, "</svg>"])


def signed_bars(rows: Sequence[tuple[str, float]], label: str, unit: str) -> str:
    """Parts of a difference: what fell to the left of the middle, what rose to its right; the residual as any part."""
    most = max((abs(amount) for _, amount in rows), default=0.0) or 1.0
    half = (WIDTH - _NAMES - 2 * _VALUES) / 2
    middle = _NAMES + _VALUES + half
    parts = [_open(len(rows), label)]
    height = _ROW * len(rows)
    parts.append(f'<line class="grid" x1="{middle:.1f}" x2="{middle:.1f}" y1="0" y2="{height}"/>')
    for i, (name, amount) in enumerate(rows):
        width = max(abs(amount) / most * half, 1.0)
        less = amount < 0
        left = middle - width if less else middle
        at = (left - 6, "end") if less else (left + width + 6, "start")
        parts += _row(
            i, name, (left, width, "less" if less else "more"), at, f"{'+' * (amount > 0)}{in_digits(amount)} {unit}"
        )
    return "\n".join([*parts, "</svg>"])


def _open(count: int, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {_ROW * count + 4}" role="img" aria-label="{html.escape(label)}">'


def _row(i: int, name: str, box: tuple[float, float, str], at: tuple[float, str], value: str) -> list[str]:
    (left, width, css), (x, anchor), y = box, at, _ROW * i
    return [
        f'<text x="{_NAMES - 8}" y="{y + 17}" text-anchor="end">{html.escape(name)}</text>',
        f'<rect class="{css}" x="{left:.1f}" y="{y + 4}" width="{width:.1f}" height="{_ROW - 8}"/>',
        f'<text x="{x:.1f}" y="{y + 17}" text-anchor="{anchor}">{html.escape(value)}</text>',
    ]
