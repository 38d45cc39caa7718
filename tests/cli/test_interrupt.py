"""Ctrl-C during a measurement, sent to all processes as a terminal does: one calm line, what had ended is kept, 130."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.bench.record import read_records
from steelyard.cli import ablate
from steelyard.cli.main import INTERRUPTED, main
from tests import tiny_model
from tests.server import served
from tests.server.fake_engine import FakeEngine

RUN = "import sys; from steelyard.cli.main import main"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, FakeEngine]]:
    for url, engine, _ in served.start(None, None):
        yield url, engine


def interrupted(words: list[str], until: Callable[[subprocess.Popen[str]], object], before: str = "pass") -> Any:
    """Run a command, send SIGINT to all its processes once `until` returns; its output and last words."""
    command = [sys.executable, "-c", f"{RUN}\n{before}\nsys.exit(main())", *words]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **pipes)
    try:
        held = until(process)
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in errors and "Exception" not in errors, errors
    assert process.returncode == INTERRUPTED
    return SimpleNamespace(out=out, last=errors.splitlines()[-1], held=held)


def asked(engine: FakeEngine, num: int) -> Callable[[object], None]:
    return lambda process: served.wait_for(lambda: len(engine.submits) >= num, f"{num} requests")


def bench_words(url: str, *words: str) -> list[str]:
    lengths = ["--random-input-len", "8", "--random-output-len", "4", "--vocab-size", "300"]
    return ["bench", "serve", "--base-url", url, "--no-selftest", *lengths, *words]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_had_ended_is_reported_and_saved(server: tuple[str, FakeEngine], processes: int, tmp_path: Path) -> None:
    url, engine = server
    engine.reset()

    def hang_later(process: object) -> None:
        served.wait_for(lambda: len(engine.submits) >= 6, "six requests")
        engine.stalled = True
        asked(engine, 7)(process)

    words = ["--num-prompts", "40", "--request-rate", "50", "--warmup", "0", "--client-processes", str(processes)]
    saving = ["--save-result", "--result-dir", str(tmp_path), "--name", "run"]
    done = interrupted(bench_words(url, *words, *saving), hang_later)
    records = read_records(tmp_path / "run.records.jsonl")
    num_ended = sum(r.ok for r in records)
    assert len(records) == 40 and 0 < num_ended < 40
    assert {r.failure for r in records if not r.ok} == {"dropped"}
    assert done.last == f"steelyard bench: stopped; the report is of the {num_ended} of 40 requests that had ended"
    report = json.loads((tmp_path / "run.json").read_text())
    assert not report["valid"] and "dropped" in done.out


def test_a_warm_up_that_is_stopped_measures_nothing(server: tuple[str, FakeEngine]) -> None:
    url, engine = server
    engine.reset()
    engine.stalled = True
    done = interrupted(bench_words(url, "--warmup", "4"), asked(engine, 1))
    assert (done.out, done.last) == ("", "steelyard bench: stopped")


@pytest.mark.slow
def test_clients_that_have_not_begun_are_stopped_too(server: tuple[str, FakeEngine]) -> None:
    url, engine = server
    engine.reset()

    def have_children(process: subprocess.Popen[str]) -> None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        served.wait_for(lambda: len(children.read_text().split()) >= 3, "three children")  # one is a tracker

    done = interrupted(bench_words(url, "--warmup", "0", "--client-processes", "2"), have_children)
    assert (done.out, done.last) == ("", "steelyard bench: stopped")


def test_quality_says_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = interrupted(["quality", "--base", url, "--arm", url, "--model", "tiny"], lambda process: silent.accept())
    assert (done.out, done.last) == ("", "steelyard quality: stopped")


@pytest.mark.parametrize("bench", ["throughput", pytest.param("latency", marks=pytest.mark.slow)])
def test_an_offline_bench_writes_the_cases_it_has_measured(bench: str, tmp_path: Path) -> None:
    cases = [{"name": "short", "requests": 1, "input": 4, "output": 2}]
    cases += [{"name": "long", "requests": 1, "input": 4, "output": 2000}]
    (tmp_path / "workloads.json").write_text(json.dumps({"models": {}, "offline": cases, "single": cases}))
    before = "from pathlib import Path; from steelyard.perf import workloads"
    before += f"; workloads.FILE = Path({str(tmp_path / 'workloads.json')!r})"
    model, report = tiny_model.write(tmp_path / "tiny"), tmp_path / "out.json"
    words = ["bench", bench, str(model), "--device", "cpu", "--runs", "1", "--workload", "short,long"]

    def first_case(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None and process.stdout.readline().startswith("short")

    done = interrupted([*words, "--json", str(report)], first_case, before)
    assert done.last == "steelyard bench: stopped; 1 cases had been measured"
    assert [row["case"] for row in json.loads(report.read_text())["rows"]] == ["short"]


def test_a_server_that_is_loading_stops_and_its_engine_says_nothing(tmp_path: Path) -> None:
    model = tiny_model.write(tmp_path / "tiny")

    def loading(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None and process.stderr.readline() == "steelyard: loading tiny\n"

    done = interrupted(["serve", str(model), "--port", "0"], loading)
    assert (done.out, done.last) == ("", "steelyard serve: stopped")


def test_an_ablation_stops_its_server_too(tmp_path: Path) -> None:
    model = tiny_model.write(tmp_path / "tiny")

    def first_run(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        assert any("run 1 of" in line for line in process.stderr)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        served.wait_for(lambda: children.read_text().strip() != "", "a server")

    done = interrupted(["ablate", str(model), "--knob", "kv-cache", "--save", str(tmp_path / "kept")], first_run)
    assert (done.out, done.last) == ("", "steelyard ablate: stopped")
    assert not (tmp_path / "kept").exists()


def test_an_ablation_keeps_the_runs_that_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def two_runs_and_no_more(self: Any, *wanted: object) -> None:
        self.reports |= {"A": {"valid": True, "label": "valid"}, "B": {"valid": True, "label": "valid"}}
        raise KeyboardInterrupt

    monkeypatch.setattr(ablate._Ablation, "run", two_runs_and_no_more)
    assert main(["ablate", "smollm2", "--knob", "kv-cache", "--save", str(tmp_path)]) == INTERRUPTED
    assert len((tmp_path / "reports.jsonl").read_text().splitlines()) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "steelyard ablate: stopped; 2 runs had ended, and 0 of 1 comparisons"
