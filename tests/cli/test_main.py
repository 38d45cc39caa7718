"""Every command ends quietly where nobody reads its output."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from steelyard.cli import main as command
from steelyard.cli.main import COMMANDS, STDOUT_CLOSED


def run(*words: str, stdout: int) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "steelyard.cli.main", *words]
    return subprocess.run(line, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)


def into_a_closed_pipe(*words: str) -> subprocess.CompletedProcess[str]:
    """Run with a standard output whose reader is gone already."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        return run(*words, stdout=write_end)
    finally:
        os.close(write_end)


@pytest.mark.parametrize("words", [("plan", "llama-3.1-8b"), ("plan", "llama-3.1-8b", "--json"), ("plan", "--help")])
def test_a_reader_that_went_away_ends_it_without_a_word(words: tuple[str, ...]) -> None:
    done = into_a_closed_pipe(*words)
    assert done.stderr == ""
    assert done.returncode == (0 if "--help" in words else STDOUT_CLOSED)  # argparse takes no notice at all


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_that_broke_elsewhere_is_not_taken_for_the_output(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command whose connection broke fails as such: standard output still takes what is written."""

    class Failing:
        @staticmethod
        def add_arguments(parser: object) -> None: ...

        @staticmethod
        def run(args: object) -> int:
            raise BrokenPipeError(32, "connection lost")

    monkeypatch.setattr(command.importlib, "import_module", lambda name: Failing)
    with pytest.raises(BrokenPipeError, match="connection lost"):
        command.main([name])
