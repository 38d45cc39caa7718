"""How a report is written for a person."""

from __future__ import annotations

from steelyard.bench.export import _said


def test_a_table_of_facts_is_written_as_words() -> None:
    assert _said({"block_size": "16", "device": "auto"}) == "block_size 16, device auto"
    assert _said("a command") == "a command"
