"""The record of where a figure was taken: the same keys in every report, nothing loaded to make it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.core import environment as machine
from steelyard.perf.environment import environment as with_torch

ROOT = Path(__file__).parent.parent.parent


def test_every_report_has_the_common_keys_and_perf_only_adds() -> None:
    plain = machine.environment()
    assert json.loads(json.dumps(plain)) == plain
    whole = with_torch()
    assert set(plain) < set(whole)
    assert whole["cpu"] == plain["cpu"] and plain["cores"] >= 1 and plain["memory_bytes"] > 0


def test_a_library_that_is_absent_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIBRARIES", ("numpy", "no-such-library"))
    found = machine.environment()
    assert found["no-such-library"] is None and found["numpy"]


def test_gpus_are_named_by_field_and_a_line_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = ["NVIDIA H200", *(str(n) for n in range(len(machine.GPU_FIELDS) - 1))]
    monkeypatch.setattr(machine, "output_of", lambda command: ", ".join(fields) + "\n\nfailed\n")
    assert machine.gpus() == [dict(zip(machine.GPU_FIELDS, fields))]


def test_a_program_that_is_absent_or_fails_says_nothing() -> None:
    assert machine.output_of(["no-such-program-here"]) == ""
    assert machine.output_of(["echo", "yes"]) == "yes\n"


def test_no_other_file_asks_the_machine_what_it_is() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tools").glob("*.py")]
    asking = [p.name for p in files if any(w in p.read_text() for w in ("/proc/cpuinfo", "platform.p", "platform.m"))]
    assert asking == ["environment.py"]
