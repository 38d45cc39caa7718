"""The self-test: every situation really comes about, and the invariant mode makes all answers the same to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from steelyard.cli.main import main
from steelyard.cli.selftest import MARKS, _line
from steelyard.core.step import TokenLogprobs
from steelyard.llm import LLM, CompletionOutput, RequestOutput
from steelyard.perf.selftest import Load, Outcome, _difference, run_selftest
from tests import tiny_model

SITUATIONS = ["again", "crowd", "chunks", "preempted", "restart"]
LOAD = Load(prompt_len=70, max_tokens=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("selftest") / "tiny")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_invariant_mode_every_situation_gives_the_same_bits(model: Path, dtype: str) -> None:
    make = partial(LLM, str(model), dtype=dtype, deterministic=True)
    outcomes = list(run_selftest(make, LOAD))
    assert [(o.situation, o.sampled) for o in outcomes] == [(s, kind) for s in SITUATIONS for kind in (False, True)]
    assert all(o.happened for o in outcomes), outcomes
    assert all(o.is_identical for o in outcomes), outcomes


def test_the_fast_mode_differs_in_the_last_bits_and_says_so(
    model: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["selftest", str(model), "--dtype", "float32", "--prompt-len", "70", "--max-tokens", "40", "--json"]
    assert main(words) == 0
    assert "holds" not in caplog.text, "the small engines are meant to be small"
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and report["cost"] is None
    assert [o["happened"] for o in report["outcomes"]] == [True] * 10
    assert 0.0 < max(o["largest"] for o in report["outcomes"]) < 1e-3


def test_a_difference_has_its_place_and_its_gap() -> None:
    def output(ids: list[int], logprobs: list[float], tops: list[dict[int, float]]) -> RequestOutput:
        told = tuple(TokenLogprobs(p, tuple(top.items())) for p, top in zip(logprobs, tops, strict=True))
        return RequestOutput(None, (1,), (CompletionOutput(0, "", tuple(ids), "length", logprobs=told),), 0)

    alone = output([5, 6, 7], [-0.5, -0.7, -0.1], [{5: -0.5}, {6: -0.7, 9: -0.75}, {7: -0.1}])
    other = output([5, 9, 8], [-0.51, -0.7, -0.1], [{}, {}, {}])
    first, gap, largest = _difference(alone, other)
    assert first == 1 and gap == pytest.approx(0.05) and largest == pytest.approx(0.01)
    assert _difference(alone, alone) == (None, None, 0.0)
    beyond = output([5, 3, 8], [-0.5, -0.7, -0.1], [{}, {}, {}])
    assert _difference(alone, beyond) == (1, None, 0.0)


def test_ok_is_said_of_the_same_tokens_only() -> None:
    same = Outcome("crowd", False, True, "8 rows", None, None, 0.0)
    row = partial(replace, same)
    for outcome, limit, mark in (
        (same, 0.25, "ok"),
        (row(largest=0.1), 0.25, "ok"),
        (row(largest=0.1), 0.0, "FAIL"),
        (row(first_difference=9, gap=0.2, largest=0.1), 0.25, "near"),
        (row(first_difference=9, gap=0.3), 0.25, "FAIL"),
        (row(first_difference=9, gap=None), 0.25, "FAIL"),
        (row(first_difference=0, sampled=True), 0.25, "near"),
        (row(first_difference=0, sampled=True), 0.0, "FAIL"),
        (row(happened=False), 0.25, "FAIL"),
    ):
        said = _line(outcome, limit)
        assert said.split()[0] == mark and f"  {mark} " in MARKS, said
        assert ("differs, within rounding" in said) == (mark == "near")
        assert "within 0" not in said.removesuffix("0.1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--prompt-len", "3"], "--prompt-len: must be a whole number of at least 16"),
        (["--prompt-len", "4000"], "more than the context"),
        (["--deterministic", "--kv-cache-dtype", "fp8"], "--deterministic reads no fp8 pool"),
        (["--deterministic", "--attention-backend", "naive"], "--deterministic has its own attention"),
    ],
)
def test_what_cannot_be_is_said(model: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str) -> None:
    assert main(["selftest", str(model), *words]) == 2
    assert named in capsys.readouterr().err
