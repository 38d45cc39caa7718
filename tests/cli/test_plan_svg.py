"""Plots of a plan: round ticks, labels that can be read, and a bar that says where the device ends."""

from __future__ import annotations

import re

import pytest

from steelyard.cli.plan_svg import Axis, Plot, bar, short

_TEXT = re.compile(r'<text x="([\d.]+)" y="([\d.]+)">([^<]+)</text></g>')


def test_labels_of_marks_that_lie_together_do_not_overlap() -> None:
    plot = Plot(Axis("x", 0.1, 1e4, log=True), Axis("y", 0.0, 10.0), "a plot")
    for index in range(8):
        plot.dot(50.0 + index, 5.0, "decode", f"batch {index}")
    boxes = [(float(x), float(y), 6.8 * len(text)) for x, y, text in _TEXT.findall(plot.svg())]
    assert len(boxes) == 8
    for i, (x, y, width) in enumerate(boxes):
        for other_x, other_y, other_width in boxes[:i]:
            apart = x >= other_x + other_width or other_x >= x + width or abs(y - other_y) >= 14
            assert apart, (x, y, other_x, other_y)


def test_labels_stay_inside_the_plot() -> None:
    plot = Plot(Axis("x", 0.0, 1.0), Axis("y", 0.0, 1.0), "corners")
    for x in (0.0, 1.0):
        for y in (0.0, 1.0):
            plot.dot(x, y, "decode", "a label of some length")
    boxes = _TEXT.findall(plot.svg())
    assert len(boxes) == 4
    assert all(76 <= float(x) <= 720 - 6.8 * len(text) for x, _, text in boxes)


def test_ticks_are_round_and_within_the_range() -> None:
    assert Axis("x", 0.0, 23.0).ticks() == [0, 5, 10, 15, 20]
    assert Axis("x", 0.25, 2e4, log=True).ticks() == [1, 10, 100, 1000, 10000]


@pytest.mark.parametrize(("value", "text"), [(1e15, "1P"), (1500, "1.5k"), (2e6, "2M"), (0.5, "0.5"), (0, "0")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_a_bar_shows_where_the_device_ends_only_if_pieces_go_beyond() -> None:
    assert "the device ends" not in bar([("weights", 3.0), ("kv", 5.0)], "GiB", "fits", 8.0)
    drawn = bar([("weights", 12.0), ("kv", -4.0), ("reserve", 0.0)], "GiB", "does not", 8.0)
    assert "the device ends: 8.00 GiB" in drawn
    assert "kv" not in drawn and "reserve" not in drawn
    assert 'x1="480.0"' in drawn


def test_a_piece_keeps_its_colour_whatever_else_is_shown() -> None:
    both = bar([("a", 1.0), ("b", 1.0), ("c", 1.0)], "GiB", "all", 3.0)
    less = bar([("a", 1.0), ("b", 0.0), ("c", 1.0)], "GiB", "fewer", 3.0)
    assert 'class="c2"><title>c' in both and 'class="c2"><title>c' in less
