"""A published benchmark, audited by arithmetic: what bound it, which number is impossible, what its clock hid."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.bench.floor import floor_tpot_ms, roofline_of
from steelyard.bench.gates import DELAY_LIMIT_MS, RATE_LEAST
from steelyard.cli.main import main
from steelyard.diagnose.sources import read_report
from steelyard.diagnose.verdict import diagnose

AUDIT = Path(__file__).parent / "audit_llama_h100.json"
DATA = json.loads(AUDIT.read_text())
FLOOR_MS = floor_tpot_ms(roofline_of(DATA["model"], DATA["device"]), DATA["input_len"])


def test_the_last_stage_is_bound_by_the_sequence_cap_and_the_client_is_capped_too() -> None:
    found = diagnose(read_report(AUDIT))
    assert found.verdict == "sequence cap (128)"
    assert [f.name for f in found.also] == ["client"]
    assert any("440" in line for line in found.also[0].evidence)
    assert read_report(AUDIT).kv_usage is None
    assert any("KV in use" in line and "absent" in line for line in found.unread)
    assert any("10938" in line and "5531" in line for line in found.unread)
    assert found.finding is not None and "--max-num-seqs" in found.finding.knob


def test_two_lines_of_arithmetic_give_the_verdict() -> None:
    seen = read_report(AUDIT)
    assert seen.little_in_flight == pytest.approx(427, abs=1)
    assert seen.decoding == pytest.approx(125.4, abs=0.1)
    assert seen.queued == pytest.approx(427 - 125.4, abs=1)


def test_the_reported_time_per_token_is_under_the_physical_floor() -> None:
    assert pytest.approx(4.48, abs=0.02) == FLOOR_MS
    first = DATA["stages"][0]
    assert first["reported_tpot_s"] * 1e3 < FLOOR_MS < first["derived_tpot_s"] * 1e3
    seen = replace(read_report(AUDIT, 0), tpot_s=first["reported_tpot_s"], floor_step_s=FLOOR_MS / 1e3)
    assert any("physical floor" in doubt for doubt in diagnose(seen).doubts)


def test_at_one_request_a_second_nothing_binds() -> None:
    assert diagnose(read_report(AUDIT, 0)).verdict == "nothing: not saturated"


@pytest.mark.parametrize(("stage", "user_s"), [(2, 7.4), (3, 16.5), (4, 24.0)])
def test_latencies_from_sending_hide_the_wait(stage: int, user_s: float) -> None:
    s = DATA["stages"][stage]
    assert s["delay_s"] + s["e2e_s"] == pytest.approx(user_s, abs=0.1)
    assert s["delay_s"] * 1e3 > DELAY_LIMIT_MS and s["achieved_rate"] / s["asked_rate"] < RATE_LEAST


def test_plan_predicts_what_lifting_the_cap_buys(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["diagnose", str(AUDIT), "--plan-model", DATA["model"], "--plan-device", DATA["device"]]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "Binding: sequence cap (128)" in said
    predicted = re.search(r"predicted: ([\d.]+) x output tokens per second: 125 rows .* become (\d+) ", said)
    assert predicted is not None and int(predicted[2]) in (426, 427)
    assert 0.0 < float(predicted[1]) < 427 / 125.4, "rows cannot buy more than their share"
