"""Counters, gauges and histograms in Prometheus' text format, written from plain numbers. No registry, no locks.

A page of thousands of lines is written on the event loop, so a line costs one formatting and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


def escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def label_text(labels: Labels) -> str:
    """`a="b",c="d"`, without braces."""
    return ",".join(f'{name}="{escape(value)}"' for name, value in labels)


class Counter:
    """A family of counters that differ in label values. Its name ends in _total."""

    def __init__(self, name: str, help: str, label_names: tuple[str, ...] = ()) -> None:
        assert name.endswith("_total"), f"{name}: a counter's name ends in _total"
        self.name = name
        self.help = help
        self.label_names = label_names
        self.values: dict[tuple[str, ...], float] = {} if label_names else {(): 0}

    def add(self, amount: float = 1, *labels: str) -> None:
        assert len(labels) == len(self.label_names), f"{self.name} has the labels {self.label_names}"
        self.values[labels] = self.values.get(labels, 0) + amount

    def snapshot(self) -> Any:
        """Plain values, for `merge` in another process."""
        return [[list(labels), value] for labels, value in self.values.items()]

    def merge(self, snapshot: Any) -> None:
        for labels, value in snapshot:
            self.add(value, *labels)

    def only(self, label: str, value: str) -> Counter:
        """The members of the family whose `label` is `value`."""
        found, at = Counter(self.name, self.help, self.label_names), self.label_names.index(label)
        found.values = {labels: amount for labels, amount in self.values.items() if labels[at] == value}
        return found

    def lines(self, common: str) -> list[str]:
        lines = _head(self.name, self.help, "counter")
        for labels, value in self.values.items():
            own = label_text(tuple(zip(self.label_names, labels)))
            lines.append(f"{self.name}{_braces(common, own)} {_number(value)}")
        return lines


class Histogram:
    """Counts of values by upper bound (inclusive), their sum and number."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def snapshot(self) -> Any:
        """Plain values, for `merge` in another process."""
        return [self.counts, self.sum]

    def merge(self, snapshot: Any) -> None:
        counts, total = snapshot
        self.counts = [mine + other for mine, other in zip(self.counts, counts, strict=True)]
        self.sum += total

    def lines(self, common: str) -> list[str]:
        lines = _head(self.name, self.help, "histogram")
        total = 0
        for bound, count in zip([*self.bounds, None], self.counts):
            total += count
            le = label_text((("le", "+Inf" if bound is None else _number(bound)),))
            lines.append(f"{self.name}_bucket{_braces(common, le)} {total}")
        lines.append(f"{self.name}_sum{_braces(common)} {_number(self.sum)}")
        lines.append(f"{self.name}_count{_braces(common)} {total}")
        return lines


def gauge_lines(name: str, help: str, values: Mapping[Labels, float], common: str) -> list[str]:
    lines = _head(name, help, "gauge")
    lines += [f"{name}{_braces(common, label_text(labels))} {_number(value)}" for labels, value in values.items()]
    return lines


def gauge_line(name: str, help: str, value: float, common: str) -> list[str]:
    """A gauge without labels of its own."""
    return gauge_lines(name, help, {(): value}, common)


def counter_lines(name: str, help: str, value: float, common: str) -> list[str]:
    """A counter kept elsewhere."""
    assert name.endswith("_total"), f"{name}: a counter's name ends in _total"
    return [*_head(name, help, "counter"), f"{name}{_braces(common)} {_number(value)}"]


def _head(name: str, help: str, kind: str) -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]


def _braces(*parts: str) -> str:
    inside = ",".join(part for part in parts if part)
    return f"{{{inside}}}" if inside else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
