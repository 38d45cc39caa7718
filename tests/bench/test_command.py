"""`steelyard bench serve` end to end over real sockets, against a server that answers at once. No time is asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.bench.record import read_records
from steelyard.cli.main import main
from tests.server import served
from tests.server.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, FakeEngine]]:
    for url, engine, _ in served.start(None, None):
        yield url, engine


def bench(url: str, directory: Path, *words: str) -> tuple[int, dict[str, object]]:
    common = ["--base-url", url, "--vocab-size", "300", "--no-selftest", "--save-result", "--warmup", "2"]
    status = main(["bench", "serve", *common, "--result-dir", str(directory), "--name", "run", *words])
    return status, json.loads((directory / "run.json").read_text())


def test_a_closed_loop_is_counted_token_for_token(server: tuple[str, FakeEngine], tmp_path: Path) -> None:
    url, _ = server
    words = ["--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "6", "--max-concurrency", "3"]
    _, report = bench(url, tmp_path, *words)
    records = read_records(tmp_path / "run.records.jsonl")
    assert [r.failure for r in records] == [None] * 12
    assert {r.num_tokens for r in records} == {6} and {r.usage.prompt_tokens for r in records} == {20}
    assert all(sum(r.tokens_by_event()) == 6 and r.counts_known for r in records)
    gates = {g["name"]: g["outcome"] for g in report["gates"]}  # type: ignore[attr-defined]
    assert gates["prompt length"] == gates["output length"] == gates["failures"] == "pass"
    for name in ("run.md", "run.html", "run.vllm.json", "runs.csv"):
        assert (tmp_path / name).stat().st_size > 500
    page = (tmp_path / "run.html").read_text()
    assert "http://" not in page.replace(url, "") and "<script" not in page and "<svg" in page
    vllm = json.loads((tmp_path / "run.vllm.json").read_text())
    assert vllm["completed"] == 12 and vllm["total_output_tokens"] == 72 and len(vllm["itls"]) == 12


def test_an_open_loop_over_two_processes_sends_everything_once(server: tuple[str, FakeEngine], tmp_path: Path) -> None:
    url, engine = server
    engine.reset()
    words = ["--num-prompts", "20", "--random-input-len", "8", "--random-output-len", "3", "--request-rate", "40"]
    bench(url, tmp_path, *words, "--client-processes", "2")
    records = read_records(tmp_path / "run.records.jsonl")
    assert [r.id for r in records] == list(range(20)) and {r.client for r in records} == {0, 1}
    assert all(r.ok for r in records)
    asked = [m.tokens for m in engine.submits][-20:]
    assert len({tuple(tokens) for tokens in asked}) == 20


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--no-selftest"]) == 2
    assert "no answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--goodput", "ttft"], ["--num-prompts", "0"], ["--burstiness", "0", "--request-rate", "1"]]
)
def test_bad_flags_are_named(
    server: tuple[str, FakeEngine], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--base-url", server[0], "--no-selftest", *words]) == 2
    assert words[0] in capsys.readouterr().err
