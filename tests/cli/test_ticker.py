"""A long offline run says how far it is, and no more often than anybody reads."""

from __future__ import annotations

import io

import pytest

from steelyard.cli import ticker
from steelyard.llm import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("out", "every_s"), [(io.StringIO(), 10.0), (Terminal(), 0.2)])
def test_lines_come_at_most_so_often(out: io.StringIO, every_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(ticker.time, "monotonic", lambda: now[0])
    with ticker.Ticker("short-short", out) as show:
        for _ in range(4):
            now[0] += every_s * 0.6
            show(Progress(4, 1, 1234))
    assert out.getvalue().count("short-short: 1/4 done, 1,234 tokens") == 2
    assert out.getvalue().endswith("\x1b[K" if out.isatty() else "\n")
