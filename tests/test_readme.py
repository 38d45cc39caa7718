"""Every command and snippet in the README and in docs/ runs as printed, against a server that `make serve` started."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.cli.main import main
from tests.plan.test_fit import batch, single, write_records

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(sh|python)\n(.*?)^```", re.M | re.S)
DEFAULT_ADDRESS = "127.0.0.1:8000"
BIN = Path(sys.executable).parent


def blocks() -> list[tuple[str, str, str]]:
    """(id, language, text) of every fenced block a user would paste."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, match in enumerate(FENCE.finditer(path.read_text())):
            found.append((f"{path.name}-{number}", match[1], match[2]))
    return found


def commands(text: str) -> list[str]:
    """Shell commands of a block: continued lines joined, comments dropped."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.split("   #")[0].strip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """host:port of a server started by `make serve` with the default model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        ["make", "serve", f"ARGS=--port {port}"], cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_until_ready(server, port)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)


def _wait_until_ready(server: subprocess.Popen[str], port: int) -> None:
    for _ in range(600):
        assert server.poll() is None, f"make serve ended: {server.stderr.read() if server.stderr else ''}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not become ready")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, with the files that their text takes for granted."""
    path = tmp_path_factory.mktemp("readme")
    write_records(path / "single.jsonl", single(128, 40) + single(4096, 40) + batch(256, 64, 64), "short")
    write_records(path / "others.jsonl", batch(4096, 64, 16), "long")
    return path


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def _check_command(command: str, address: str, folder: Path) -> None:
    if command.startswith(("make ", "pip ")):
        _check_without_running(command, folder)
    elif command.startswith("steelyard serve"):
        # It serves until it is told to stop; the server of this module is the same command. Its flags must parse.
        _run_here(f"{command} --help", folder)
    elif command.startswith("steelyard plan") and not set(command) & set("|<>$;&*"):
        assert _run_here(command, folder).strip(), f"{command} printed nothing"
    else:
        output = _run(command.replace(DEFAULT_ADDRESS, address), folder)
        assert output.strip(), f"{command} printed nothing"


def _check_without_running(command: str, folder: Path) -> None:
    if command.startswith("make "):
        _run(f"make -n -C {ROOT} {command.removeprefix('make ')}", folder)
        return
    for word in command.split():
        if word.endswith(".txt"):
            assert (ROOT / word).exists(), command


def _run_here(command: str, folder: Path) -> str:
    """The same without a process of its own, whose imports take longer than what it does."""
    output = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output):
        try:
            status = main(shlex.split(command)[1:])
        except SystemExit as end:
            status = int(end.code or 0)
    assert status == 0, f"{command}\n{output.getvalue()}"
    return output.getvalue()


def _run(command: str, folder: Path) -> str:
    """Standard output of a command that succeeds; what it reads from the terminal is one short line."""
    done = subprocess.run(
        ["bash", "-c", command],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=180,
        cwd=folder,
        input="Hello\n",
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "language", "text"), blocks(), ids=[b[0] for b in blocks()])
def test_block_runs_as_printed(name: str, language: str, text: str, address: str, folder: Path) -> None:
    if language == "python":
        code = text.replace(DEFAULT_ADDRESS, address)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        return
    for command in commands(text):
        _check_command(command, address, folder)


CONSOLE = re.compile(r"^```console\n(.*?)^```", re.M | re.S)


def console_commands() -> list[str]:
    """Commands shown with a prompt, which need a GPU, a load or minutes: their words are checked, not run."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for match in CONSOLE.finditer(path.read_text()):
            lines = match[1].replace("\\\n", " ").splitlines()
            found += [line[2:].split("   #")[0].strip() for line in lines if line.startswith("$ steelyard ")]
    return sorted(set(found))


@pytest.mark.parametrize("command", console_commands())
def test_shown_command_is_one_that_the_command_line_takes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)[1:]
    taken: list[object] = []
    monkeypatch.setattr(f"steelyard.cli.{words[0]}.run", lambda args: taken.append(args) or 0)
    assert main(words) == 0
    assert taken
