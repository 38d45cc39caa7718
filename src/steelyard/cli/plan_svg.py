"""Axes and marks of a plot as SVG text: scales, ticks, lines, labels. Knows nothing of plans."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 18, 56


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values, linear or logarithmic, and its title."""

    title: str
    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies between the ends: 0 to 1, clipped."""
        if self.log:
            low, high, here = math.log(self.low), math.log(self.high), math.log(max(value, self.low))
        else:
            low, high, here = self.low, self.high, value
        return min(max((here - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Round values within the range: powers of ten, or 1, 2, 5 times one."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**k for k in range(first, last + 1)]
        raw = (self.high - self.low) / 5
        scale = 10.0 ** math.floor(math.log10(raw))
        step = next(m * scale for m in (1, 2, 5, 10) if m * scale >= raw)
        first = math.ceil(self.low / step)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


_Box = tuple[float, float, float, float]  # left, top, right, bottom
_CHAR = 6.8
"""Width of a label's character at most, in the units of the view box."""


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@dataclass(slots=True)
class Plot:
    """A plot being drawn: add marks, then `svg()`."""

    x: Axis
    y: Axis
    label: str
    _marks: list[str] = field(default_factory=list)
    _labels: list[_Box] = field(default_factory=list)

    def line(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """A line through (x, y) values."""
        path = " ".join(f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in points)
        self._marks.append(f'<polyline class="{css}" points="{path}"/>')

    def dot(self, x: float, y: float, css: str, text: str, tip: str = "") -> None:
        """A mark with a label beside it and more on hovering."""
        px, py = self._px(x), self._py(y)
        said = html.escape(tip or text)
        mark = f'<title>{said}</title><circle class="{css}" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>'
        if text:
            left, base = self._free_place(px, py, _CHAR * len(text))
            mark += f'<text x="{left:.1f}" y="{base:.1f}">{html.escape(text)}</text>'
        self._marks.append(f"<g>{mark}</g>")

    def _free_place(self, px: float, py: float, width: float) -> tuple[float, float]:
        """Left end and baseline of a label near a mark, over no other label: below, above, then further."""
        for rise in (17, -7, 32, -22, 47, -37):
            for left in (px + 8, px - 8 - width):
                box = (left, py + rise - 11, left + width, py + rise + 3)
                inside = box[0] >= _LEFT and box[2] <= WIDTH and box[1] >= _TOP - 14 and box[3] <= HEIGHT - _BOTTOM
                if inside and not any(_overlap(box, other) for other in self._labels):
                    self._labels.append(box)
                    return left, py + rise
        return px + 8, py - 7

    def rule(self, x: float, text: str) -> None:
        """A vertical line at a value, with a label at its top."""
        px = self._px(x)
        anchor, shift = ("end", -4) if px > WIDTH / 2 else ("start", 4)
        self._marks.append(
            f'<line class="rule" x1="{px:.1f}" x2="{px:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<text class="note" x="{px + shift:.1f}" y="{_TOP + 12}" text-anchor="{anchor}">{html.escape(text)}</text>'
        )

    def svg(self) -> str:
        """The plot as one <svg> element."""
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(self.label)}">']
        for value in self.x.ticks():
            px = self._px(value)
            parts.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
            parts.append(f'<text x="{px:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{short(value)}</text>')
        for value in self.y.ticks():
            py = self._py(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{short(value)}</text>')
        middle_x, middle_y = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + HEIGHT - _BOTTOM) / 2
        parts.append(f'<text class="axis" x="{middle_x}" y="{HEIGHT - 12}" text-anchor="middle">{self.x.title}</text>')
        turned = f'transform="rotate(-90 16 {middle_y})" x="16" y="{middle_y}"'
        parts.append(f'<text class="axis" {turned} text-anchor="middle">{self.y.title}</text>')
        return "\n".join([*parts, *self._marks, "</svg>"])

    def _px(self, value: float) -> float:
        return _LEFT + self.x.at(value) * (WIDTH - _LEFT - _RIGHT)

    def _py(self, value: float) -> float:
        return HEIGHT - _BOTTOM - self.y.at(value) * (HEIGHT - _TOP - _BOTTOM)


def bar(pieces: Sequence[tuple[str, float]], unit: str, label: str, limit: float) -> str:
    """One stacked bar with a legend under it; a piece is (name, amount). Pieces of nothing are left out.

    Where pieces go beyond `limit` (in the unit), a line stands at it.
    """
    shown = [(index, name, amount) for index, (name, amount) in enumerate(pieces) if amount > 0]
    total = sum(amount for _, _, amount in shown)
    rows = -(-len(shown) // 3)
    parts = [f'<svg viewBox="0 0 {WIDTH} {64 + 24 * rows}" role="img" aria-label="{html.escape(label)}">']
    left = 0.0
    for place, (index, name, amount) in enumerate(shown):
        width = WIDTH * amount / total
        said = html.escape(f"{name}: {amount:,.2f} {unit}")
        column, row = place % 3, place // 3
        x, y = column * WIDTH / 3, 64 + 24 * row
        parts.append(f'<g class="c{index}"><title>{said}</title>')
        parts.append(f'<rect x="{left:.1f}" y="0" width="{max(width, 1.0):.1f}" height="44"/>')
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="12" height="12" rx="2"/></g>')
        parts.append(f'<text x="{x + 18:.1f}" y="{y + 11}">{said}</text>')
        left += width
    if total > limit * (1 + 1e-9):
        x = WIDTH * limit / total
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="50"/>')
        parts.append(f'<text x="{x - 5:.1f}" y="58" text-anchor="end">the device ends: {limit:,.2f} {unit}</text>')
    return "\n".join([*parts, "</svg>"])


def short(value: float) -> str:
    """A number as a tick shows it: 1500 -> 1.5k, 2000000 -> 2M."""
    for scale, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{suffix}"
    return f"{value:g}"
