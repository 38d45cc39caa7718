"""Comparisons of two arms: pairs, attribution that sums with its residual, and the reasons not to believe one."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.bench.ablate import KNOBS, attribute, compare, interleaved, knobs_named, to_markdown
from steelyard.cli.main import main
from steelyard.errors import InvalidRequest

BLOCK = KNOBS["block-size"]


def report(e2e_ms: float, states: dict[str, float], block: str = "16", **changes: Any) -> dict[str, Any]:
    layout = f"{changes.get('dtype', 'bf16')}/{block}"
    config = {"block_size": block, "kv_layout": layout, "num_gpu_blocks": str(64 // int(block))}
    window = {
        "output_tokens_per_s": 1e6 / e2e_ms,
        "latency_ms": {"service": {"e2e": {"mean": e2e_ms}, "ttft": {"p50": 5.0}}},
        "tpot_ms": {"p50": e2e_ms / 100},
        "icl_ms": {"p99": 1.0},
    }
    return {
        "valid": changes.get("valid", True),
        "label": "valid" if changes.get("valid", True) else "INVALID",
        "workload": {"digest": changes.get("digest", "w")},
        "server_facts": {"config": config},
        "summary": {
            "windows": {"whole run": window},
            "server": {"time_by_state_s": states, "requests_ended": 10.0},
        },
    }


def arms(**changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    a = [report(100 + i, {"decode": 0.9, "wait_slot": 0.05}) for i in range(3)]
    b = [report(80 + i, {"decode": 0.7, "wait_slot": 0.06}, "64", **changes) for i in range(3)]
    return a, b


def test_runs_alternate_and_neither_arm_always_goes_first() -> None:
    assert [arm for _, arm in interleaved(3)] == list("ABBAAB")
    assert [pair for pair, _ in interleaved(2)] == [0, 0, 1, 1]


def test_the_difference_is_the_accounts_and_the_residual() -> None:
    parts, residual = attribute(*arms())
    assert parts["decode (memory traffic)"] == pytest.approx(-20.0) and parts["queueing"] == pytest.approx(1.0)
    assert residual == pytest.approx(-20.0 - (-20.0 + 1.0))
    no_ledger = [report(100, {})]
    assert attribute(no_ledger, no_ledger) == ({}, None)


def test_a_clean_comparison_is_not_void() -> None:
    found = compare(BLOCK, *arms())
    assert found.void == () and found.metrics["E2E mean, ms"].decided
    text = to_markdown([found], {})
    assert "speed only" in text and "residual" in text


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"valid": False}, "not valid"), ({"digest": "other"}, "same work"), ({"dtype": "fp32"}, "more than the knob")],
)
def test_reasons_not_to_quote_a_difference(changes: dict[str, Any], why: str) -> None:
    assert any(why in reason for reason in compare(BLOCK, *arms(**changes)).void)


def test_a_flag_without_effect_and_one_not_read_back_are_said() -> None:
    a, _ = arms()
    assert any("no effect" in reason for reason in compare(BLOCK, a, a).void)
    assert any("not shown to have taken effect" in reason for reason in compare(KNOBS["graphs"], a, a).void)
    assert any("at least 3" in reason for reason in compare(BLOCK, a[:1], a[:1]).void)


def test_unknown_knobs_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="block-size"):
        knobs_named(["turbo"])
    assert main(["ablate", "smollm2", "--knob", "turbo"]) == 2
    assert "turbo" in capsys.readouterr().err
