"""`steelyard bench kernels` and `steelyard doctor` from the command line, with tiny cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from steelyard.cli import doctor
from steelyard.cli.main import main
from steelyard.perf import kernel_bench
from steelyard.perf.attention_cases import AttentionCase
from steelyard.perf.ceilings import Ceiling

TINY = ["--lengths", "32", "--head-dims", "16", "--heads", "2", "--kv-heads", "1", "--decode-batches", "2"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here asks how fast this machine is: one call a time, made-up ceilings, tiny cases."""
    tiny = AttentionCase(1, 32, 32, 2, 1, 16, True, torch.float32)
    monkeypatch.setattr(doctor, "_cases", lambda device: (tiny,))
    monkeypatch.setattr(kernel_bench, "measure_ceiling", lambda device, dtype: Ceiling("float32", 1e12, 1e10, 1e10))
    monkeypatch.setattr(kernel_bench, "median_ms", lambda calls, device: float(calls[0]() is not None))


def test_bench_kernels_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "k.json", tmp_path / "k.html"
    words = ["bench", "kernels", "--device", "cpu", *TINY, "--backends", "naive,steelyard", "--mask", "both"]
    assert main([*words, "--json", str(out), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "prefill 1x32:32 heads 2/1x16 causal, forward" in text and "ceilings of this run" in text
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * (2 + 2 + 1)  # two attentions: two masks forward and backward, one decode
    assert "<svg" in page.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backends", "naive,fastest"], "--backends must be among naive"),
        (["--directions", "sideways"], "--directions must be among forward, backward"),
        (["--heads", "4", "--kv-heads", "3"], "--kv-heads must divide the 4 query heads"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err


def test_doctor_prints_its_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--no-model"]) == 0
    text = capsys.readouterr().out
    for section in ("python ", "cuda ", "libraries", "attentions on this cpu", "what really ran", "findings"):
        assert section in text


def test_doctor_profiles_the_steps_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    ran = json.loads(capsys.readouterr().out)["ran"]
    assert [step["what"] for step in ran[1:]] == ["prefill of 256 tokens, smollm2", "decode, smollm2"]
    assert all(step["is_fast"] and step["kernels"] for step in ran)


def test_doctor_goes_on_without_a_model_and_says_that_the_one_named_was_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--device", "cpu", "--model", "/no/such/model", "--json"]) == 1
    assert "No model was profiled" in json.loads(capsys.readouterr().out)["findings"][0]
