"""Rows over steps, as text and as a picture: the textbook's drawing of batching, made from the step ledger.

row 0 PPaaaaaaa.PPPffff     across: steps; P prefill, R recompute, a letter a request while it decodes, . empty
row 1 .PPbbb..PPeeeeeee     the picture draws each step as wide as it was long, and the gaps before it
"""

from __future__ import annotations

from html import escape
from typing import Any

from steelyard.cli.durations import duration

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WIDTH, _LEFT, _ROW, _TOP = 1200, 46, 14, 28


def timeline(steps: list[dict[str, Any]]) -> str:
    """One line a row, one character a step, and what the steps had in common."""
    if not steps:
        return "no step yet"
    rows = _rows(steps)
    letters: dict[tuple[str, int], str] = {}
    grid = {row: ["."] * len(steps) for row in rows}
    for i, step in enumerate(steps):
        for share in step["shares"]:
            letter = letters.setdefault((share["request"], share["index"]), _LETTERS[len(letters) % len(_LETTERS)])
            grid[share["row"]][i] = {"prefill": "P", "recompute": "R"}.get(share["kind"], letter)
    lines = [f"row {row:4} {''.join(cells)}" for row, cells in grid.items()]
    return "\n".join([*lines, f"{_sums(steps)}; P prefill, R recompute, a letter a request"])


def picture(steps: list[dict[str, Any]]) -> str:
    """The same as SVG, to scale in time: a colour a request, dark where it computes its prompt, dashed again."""
    rows = {row: at for at, row in enumerate(_rows(steps))}
    begin_ns = steps[0]["commit_ns"] - steps[0]["span_ns"] if steps else 0
    scale = (_WIDTH - _LEFT) / max(steps[-1]["commit_ns"] - begin_ns if steps else 0, 1)
    height = _TOP + _ROW * len(rows) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="10"><rect width="100%" height="100%" fill="#fbfaf7"/>',
        f'<text x="4" y="16" font-size="12">{escape(_sums(steps) if steps else "no step yet")}; '
        "dark: prompt, light: tokens, striped: computed again</text>",
        '<defs><pattern id="again" width="4" height="4" patternUnits="userSpaceOnUse">'
        '<path d="M0 4 4 0" stroke="#fff" stroke-width="1.2"/></pattern></defs>',
    ]
    parts += [f'<text x="4" y="{_TOP + _ROW * at + 10}" fill="#65686f">{row}</text>' for row, at in rows.items()]
    hues: dict[tuple[str, int], int] = {}
    for step in steps:
        x = _LEFT + (step["commit_ns"] - step["device_ns"] - begin_ns) * scale
        width = max(step["device_ns"] * scale - 0.2, 0.2)
        for share in step["shares"]:
            hue = hues.setdefault((share["request"], share["index"]), 67 * len(hues) % 360)
            light = 74 if share["kind"] == "decode" else 40
            box = f'x="{x:.2f}" y="{_TOP + _ROW * rows[share["row"]]}" width="{width:.2f}" height="{_ROW - 2}"'
            name = escape(f"{share['request']}#{share['index']}: {share['kind']}, {share['tokens']} tokens")
            parts.append(f'<rect {box} fill="hsl({hue} 55% {light}%)"><title>{name}</title></rect>')
            if share["kind"] == "recompute":
                parts.append(f'<rect {box} fill="url(#again)"/>')
    return "\n".join([*parts, "</svg>\n"])


def _rows(steps: list[dict[str, Any]]) -> list[int]:
    return sorted({share["row"] for step in steps for share in step["shares"]})


def _sums(steps: list[dict[str, Any]]) -> str:
    span_ns, device_ns = (sum(step[name] for step in steps) for name in ("span_ns", "device_ns"))
    busy, cells = sum(len(step["shares"]) for step in steps), len(_rows(steps)) * len(steps)
    return (
        f"{len(steps)} steps in {duration(span_ns)}, device busy {device_ns / max(span_ns, 1):.0%}, rows filled "
        f"{busy / max(cells, 1):.0%}"
    )
