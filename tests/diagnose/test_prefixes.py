"""Prompts whose shared part comes too late: seen without their text, named with it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from steelyard.cli.main import main
from steelyard.diagnose.prefixes import look

SYSTEM = [f"w{i}" for i in range(200)]


def prompts_with(front: list[str]) -> list[list[str]]:
    draw = random.Random(0)
    return [[*front, f"2026-03-0{i}T10:0{i}", *SYSTEM, *(f"q{draw.random()}" for _ in range(20))] for i in range(1, 9)]


def test_a_time_stamp_in_front_costs_what_follows_it() -> None:
    words = prompts_with(["You", "are", "helpful", "it", "is"])
    found = look(words, words)
    assert found is not None and found.common_break == 5
    assert found.reused_share < 0.03 and found.reusable_share > 0.7
    assert found.kinds[0] == ("a date or time", 7)


def test_without_text_the_break_is_found_and_nothing_is_named() -> None:
    hashed = [[hash(w) for w in p] for p in prompts_with(["You"])]
    found = look(hashed)
    assert found is not None and found.common_break == 1 and found.kinds == ()


def test_the_varying_part_at_the_end_costs_nothing() -> None:
    found = look([[*SYSTEM, f"id{i}"] for i in range(6)])
    assert found is not None and found.saved_tokens == 0 and found.reused_share > 0.8


def test_a_shuffled_list_is_said_to_be_one() -> None:
    parts = [[f"tool{k} {i}" for i in range(40)] for k in range(4)]
    draw, prompts = random.Random(2), []
    for _ in range(6):
        draw.shuffle(parts)
        prompts.append([w for part in parts for w in part])
    found = look(prompts)
    assert found is not None and found.num_moved >= 4 and found.saved_tokens > 0


def test_the_command_reads_prompts_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": " ".join(p)}) for p in prompts_with(["You"])))
    assert main(["diagnose", "--prompts", str(path)]) == 0
    assert "date" not in capsys.readouterr().out
    assert main(["diagnose", "--prompts", str(path), "--show-text"]) == 0
    assert "a date or time" in capsys.readouterr().out
    audit = Path(__file__).parent / "audit_llama_h100.json"
    assert main(["diagnose", str(audit), "--ttft", "500", "--tpot", "50"]) == 0
    assert "sequence cap (128)" in capsys.readouterr().out
    assert main(["diagnose"]) == 2
