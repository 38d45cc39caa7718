"""`steelyard serve` as a process: why it does not start, and what happens when its engine or its operator ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import tiny_model

SERVE = [sys.executable, "-m", "steelyard.cli.main", "serve"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


def failure(*args: str) -> str:
    """The one line a failed start prints; it must exit with 2, without a traceback."""
    done = subprocess.run([*SERVE, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("steelyard serve: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_taken_port_is_said_before_anything_is_loaded(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = failure(str(model), "--port", str(port))
    assert f"port {port}" in line
    assert "--port" in line


def test_a_missing_model_and_a_bad_flag_are_said_in_one_line() -> None:
    assert "no model './nothing-here'" in failure("./nothing-here", "--port", "0")
    assert "--block-size" in failure("smollm2", "--block-size", "24", "--port", "0")


def test_what_the_engine_says_when_it_cannot_start_is_the_line(model: Path) -> None:
    assert "memory" in failure(str(model), "--port", "0", "--kv-cache-memory-bytes", "1000")


@pytest.fixture
def running(model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A scripted server that answers for a long time: (process, url). Its stdout has been read up to the address."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"eos_token_id": 2, "default": [40] * 1900}))
    process = subprocess.Popen(
        [*SERVE, str(model), "--script", str(script), "--port", "0", "--shutdown-timeout", "0.5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    text = ""
    while (line := process.stdout.readline()) and "-d '" not in line:
        text += line
    text += line
    url = re.search(r"http://[\d.:]+", text)
    assert url is not None, text
    yield process, text
    process.kill()
    process.wait()


def _url(text: str) -> str:
    match = re.search(r"http://[\d.:]+", text)
    assert match is not None
    return match[0]


def _held_stream(url: str, engine: int) -> tuple[threading.Thread, list[str]]:
    """A stream whose engine is stopped after its first tokens; the lines it gets until its end."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": [5], "max_tokens": 1900, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 3:
                    os.kill(engine, signal.SIGSTOP)
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(20)
    return thread, lines


def _engine(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


def test_a_killed_engine_is_an_error_to_its_requests_a_503_and_an_exit_status(
    running: tuple[subprocess.Popen[str], str],
) -> None:
    process, text = running
    url, engine = _url(text), _engine(process)
    thread, lines = _held_stream(url, engine)
    os.kill(engine, signal.SIGKILL)
    seen = ""
    deadline = time.monotonic() + 20
    while "killed by signal 9" not in seen:
        assert time.monotonic() < deadline, seen
        try:
            seen = httpx.get(f"{url}/health").text
        except httpx.TransportError as error:
            raise AssertionError(f"the server left before its health said why; last: {seen}") from error
        time.sleep(0.02)
    thread.join()
    assert "data: [DONE]" not in lines
    assert "killed by signal 9" in [line for line in lines if line][-1]
    assert process.wait(20) == 1


def test_the_printed_curl_line_works_and_what_outlives_the_shutdown_timeout_gets_an_error_event(
    running: tuple[subprocess.Popen[str], str],
) -> None:
    process, text = running
    command = text[text.index("curl") :].strip() + " -s"
    pasted = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert json.loads(pasted.stdout)["choices"][0]["finish_reason"] == "length"
    engine = _engine(process)
    thread, lines = _held_stream(_url(text), engine)
    process.send_signal(signal.SIGTERM)
    thread.join()
    os.kill(engine, signal.SIGCONT)
    assert "data: [DONE]" not in lines
    assert "shut down" in [line for line in lines if line][-1]
    assert process.wait(20) == 0
