"""Comparisons of two arms: pairs, attribution that sums with its residual, and the reasons not to believe one."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any, cast

import pytest

from steelyard.bench.ablate import attribute, compare, interleaved
from steelyard.bench.ablate_text import SetResult, knobs_markdown, quality_lines, set_markdown
from steelyard.bench.arms import KNOBS, SETS, knobs_named, sets_named
from steelyard.bench.expect import Load, expected
from steelyard.bench.floor import roofline_of
from steelyard.cli import ablate, quality, serve
from steelyard.cli.ablate_page import page
from steelyard.cli.ablate_save import as_json
from steelyard.cli.main import main
from steelyard.config import EngineConfig
from steelyard.core.verdict import Held, Outcome, Verdict
from steelyard.errors import InvalidRequest
from steelyard.plan.calibration import default_calibration

BLOCK = KNOBS["block-size"]


def report(e2e_ms: float, states: dict[str, float], block: str = "16", **changes: Any) -> dict[str, Any]:
    layout = f"{changes.get('dtype', 'bf16')}/{block}"
    config = {"block_size": block, "kv_layout": layout, "num_gpu_blocks": str(64 // int(block))}
    config |= changes.get("config", {})
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
            "server": {
                "time_by_state_s": states,
                "requests_ended": 10.0,
                "generation_tokens": 100.0,
                "device_s": 2.0,
                "running": {"mean": 4.0, "max": 8.0},
            },
        },
    }


def arms(**changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    a = [report(100 + i, {"decode": 0.9, "wait_slot": 0.05}) for i in range(3)]
    b = [report(80 + i, {"decode": 0.7, "wait_slot": 0.06}, "64", **changes) for i in range(3)]
    return a, b


def test_runs_alternate_and_neither_arm_always_goes_first() -> None:
    assert [arm for _, arm in interleaved(3)] == list("ABBAAB")
    assert [pair for pair, _ in interleaved(2)] == [0, 0, 1, 1]
    assert [arm for _, arm in interleaved(2, "ABC")] == list("ABCCBA")


def test_the_difference_is_the_accounts_and_the_residual() -> None:
    parts, residual = attribute(*arms())
    assert parts["decode (memory traffic)"] == pytest.approx(-20.0) and parts["queueing"] == pytest.approx(1.0)
    assert residual == pytest.approx(-20.0 - (-20.0 + 1.0))
    no_ledger = [report(100, {})]
    assert attribute(no_ledger, no_ledger) == ({}, None)


def test_a_clean_comparison_is_not_void() -> None:
    found = compare(BLOCK, *arms())
    assert found.void == () and found.metrics["E2E mean, ms"].decided
    text = knobs_markdown([found])
    assert "speed only" in text and "residual" in text and "Predicted: nothing" in text
    assert "the difference is the geometric mean over pairs of B over A" in text
    assert found.spent["device time an output token, ms"] == (pytest.approx(20.0), pytest.approx(20.0))


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"valid": False}, "not valid"), ({"digest": "other"}, "same work"), ({"dtype": "fp32"}, "more than the knob")],
)
def test_reasons_not_to_quote_a_difference(changes: dict[str, Any], why: str) -> None:
    assert any(why in reason for reason in compare(BLOCK, *arms(**changes)).void)


def test_a_flag_without_effect_and_one_not_read_back_are_said() -> None:
    a, _ = arms()
    assert any("no effect" in reason for reason in compare(BLOCK, a, a).void)
    silent = [{**r, "server_facts": {}} for r in a]
    assert any("not shown to have taken effect" in reason for reason in compare(BLOCK, silent, silent).void)
    assert any("at least 3" in reason for reason in compare(BLOCK, a[:1], a[:1]).void)


def test_a_prefix_cache_without_anything_to_find_is_said() -> None:
    a, b = arms()
    knob = KNOBS["prefix-caching"]
    assert any("--shared-prefix 256" in why for why in compare(knob, a, b).void)
    shared = [{**r, "workload": {"digest": "w", "declared_cached": 0.5}} for r in b]
    assert not any("--shared-prefix" in why for why in compare(knob, a, shared).void)
    b[0]["summary"]["server"]["prefix_hits"] = 16.0
    assert not any("--shared-prefix" in why for why in compare(knob, a, b).void)
    assert not any("--shared-prefix" in why for why in compare(BLOCK, *arms()).void)


def test_unknown_knobs_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="block-size"):
        knobs_named(["turbo"])
    assert main(["ablate", "smollm2", "--knob", "turbo"]) == 2
    assert "turbo" in capsys.readouterr().err


def test_every_arm_s_flags_are_the_server_s_and_every_knob_is_read_back() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    for knob in KNOBS.values():
        for flags in (knob.a, knob.b):
            parser.parse_args(["smollm2", *knob.both, *flags])
        assert knob.read_back in {f.name for f in fields(EngineConfig)}
    for arms in SETS.values():
        for _, flags in arms.arms:
            parser.parse_args(["smollm2", *arms.both, *flags])
    assert {"kv-cache", "attention", "batching", "allocation", "prefix-caching", "chunked-prefill", "budget", "graphs",
            "overlap", "dtype", "block-size"} <= KNOBS.keys()  # fmt: skip
    assert [len(s.arms) for s in SETS.values()] == [3, 4]
    with pytest.raises(InvalidRequest, match="combinations, batching"):
        sets_named(["everything"])


def test_a_change_that_brings_another_along_is_void_unless_it_cannot_be_helped() -> None:
    a = [report(100, {"decode": 0.9}, config={"batching": "static", "batch_size": "8"}) for _ in range(3)]
    b = [report(90, {"decode": 0.9}, config={"batching": "continuous", "batch_size": ""}) for _ in range(3)]
    assert compare(KNOBS["batching"], a, b).void == ()
    c = [report(90, {"decode": 0.9}, config={"batching": "continuous", "dtype": "bfloat16"}) for _ in range(3)]
    assert any("dtype" in why for why in compare(KNOBS["batching"], a, c).void)


def test_a_set_is_one_table_with_prefill_and_decode_apart_and_each_step_attributed() -> None:
    arms = SETS["combinations"]
    reports = [[report(e2e, {"decode": e2e / 100}) for _ in range(3)] for e2e in (300.0, 200.0, 100.0)]
    steps = [compare(k, a, b) for k, a, b in zip(arms.knobs(), reports, reports[1:])]
    result = SetResult(arms, reports, steps, [judged("fail"), judged("pass"), Verdict("the base of the others")])
    text = set_markdown(result)
    assert "| no cache, naive attention | 3,333 | 5 | 3 |" in text and "| cache, efficient attention | 10,000" in text
    assert text.count("residual, in no account") == 2
    shown = page([], [result], {"a": reports[0][0]})
    assert shown.count("<svg") == 3 + 2 and "http" not in shown.replace("http-equiv", "")
    assert result.as_json()["arms"][2]["figures"]["decode: TPOT p50, ms"] == [1.0, 1.0, 1.0]
    assert [line.split(" | ")[-1] for line in text.splitlines() if "| at least 98.0% |" in line] == ["fail |", "pass |"]
    assert result.as_json()["arms"][0]["quality"]["figures"][0]["low"] == 0.98
    assert shown.count("<td>at least 98.0%</td>") == 2 and shown.count("fail: top-1 agreement 95.0%") == 1


def judged(outcome: str) -> Verdict:
    value, held = (0.95, "fail") if outcome == "fail" else (0.99, "pass")
    figure = Held("top-1 agreement", value, 0.98, None, 1.0, ".1%", cast(Outcome, held))
    return Verdict(outcome, (figure,), "this against that")


def test_arms_that_were_not_judged_share_a_line() -> None:
    arms = SETS["combinations"]
    result = SetResult(arms, [[report(100.0, {})]] * 3, [], [Verdict("speed only")] * 3)
    assert quality_lines(result) == ["Quality: speed only"]


def test_a_knob_shows_each_figure_of_its_answers_beside_the_limit_once() -> None:
    found = replace(compare(BLOCK, *arms()), quality=judged("fail"))
    text, shown = knobs_markdown([found]), page([found], [], {"a": arms()[0][0]})
    assert "* Quality, this against that: fail: top-1 agreement 95.0%, at least 98.0%" in text
    assert text.count("| this against that | top-1 agreement | 95.0% | at least 98.0% | 100.0% | fail |") == 1
    assert shown.count("<td>at least 98.0%</td>") == 1 and "fail: top-1 agreement 95.0%" in shown
    (knob,) = as_json([found], [])["knobs"]
    assert knob["quality"]["figures"][0]["value"] == 0.95 and knob["quality"]["outcome"] == "fail"


@pytest.mark.parametrize(
    ("arms", "base", "said"),
    [
        ({"A": ["--old"], "B": ["--new"]}, "A", ["the base of the others", "pass"]),
        ({"x": ["--old"], "y": [], "z": ["--new"]}, "z", ["pass", "pass", "the base of the others"]),
    ],
)
def test_a_change_is_judged_against_what_was_before_it_and_a_set_against_its_last_arm(
    monkeypatch: pytest.MonkeyPatch, arms: dict[str, list[str]], base: str, said: list[str]
) -> None:
    @asynccontextmanager
    async def served(model: str, flags: Sequence[str]) -> AsyncIterator[str]:
        yield " ".join(flags)

    asked = []

    async def judge_servers(base_url: str, arm_url: str, **options: object) -> tuple[Verdict, None, None]:
        asked.append((base_url, arm_url))
        return judged("pass"), None, None

    monkeypatch.setattr(ablate, "served", served)
    monkeypatch.setattr(quality, "judge_servers", judge_servers)
    args = argparse.Namespace(serve_args="--shared", serve_model="m", quality=True, quality_tasks=8)
    found = asyncio.run(ablate._Ablation(args)._quality(arms, base))
    url = {name: " ".join(["--shared", *flags]) for name, flags in arms.items()}
    assert asked == [(url[base], url[name]) for name in arms if name != base]
    assert [v.outcome for v in found] == said
    assert [v.judged for v in found if v.figures] == [f"{name} against {base}" for name in arms if name != base]
    args.serve_args = "--load-format dummy"
    assert {v.outcome for v in asyncio.run(ablate._Ablation(args)._quality(arms, base))} == {ablate.RANDOM_WEIGHTS}


def test_a_page_is_good_news_only_where_a_change_is_decided() -> None:
    a, b = arms()
    for num_pairs, css, said in ((3, "pass", "of 1 changes, 1 decided"), (2, "warn", "of 1 changes, none decided")):
        found = compare(BLOCK, a[:num_pairs], b[:num_pairs])
        shown = page([found], [], {str(i): r for i, r in enumerate([*a[:num_pairs], *b[:num_pairs]])})
        assert f'class="verdict {css}"' in shown and said in shown
        assert found.decides == (num_pairs == 3)
        assert (" (-) | no |" in knobs_markdown([found])) == (num_pairs == 2)
    assert any("2 pairs: at least 3" in why for why in compare(BLOCK, a[:2], b[:2]).void)
    assert not compare(BLOCK, *arms(valid=False)).decides, "what may not be quoted decides nothing"


def test_plan_expects_what_arithmetic_says() -> None:
    roofline = roofline_of("llama-3.1-8b", "H200")
    model = roofline, default_calibration(roofline)
    load = Load(256, 128, 32)
    by_name = {name: expected(name, model, load, 0.5) for name in KNOBS}
    kv, naive, dtype, prefix = (by_name[n] for n in ("kv-cache", "attention", "dtype", "prefix-caching"))
    assert kv is not None and naive is not None and dtype is not None and prefix is not None
    # 32 rows of 320 tokens: 10,240 tokens of compute against one reading of the weights
    assert 0.005 < kv.ratio < 0.05 and "anew" in kv.formula
    assert 0.3 < naive.ratio < 1.0 and 0.4 < dtype.ratio < 0.65 and 0.4 < prefix.ratio < 1.0
    assert by_name["graphs"] is None


def test_an_ablation_without_a_knob_or_a_set_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "smollm2"]) != 0
    assert "combinations, batching" in capsys.readouterr().err
