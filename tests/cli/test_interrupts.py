"""A Ctrl-C at the moments that are easily missed: whatever a command is doing, its process ends with its own status."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ENTRY = """
import atexit, os, signal, sys, time
from steelyard.cli import main as command

def press(): signal.raise_signal(signal.SIGINT)

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT): kill(pid, number)

class Press:
    def __getattr__(self, name): return press()

class Command:
    @staticmethod
    def add_arguments(parser): {load}
    @staticmethod
    def run(args):
        {run}
        return 0

command.importlib.import_module = lambda name: Command
sys.exit(command.main())
"""
"""`python -m` this: the command's own code runs in `steelyard NAME`, without a module of that name."""

DEAF = """
import signal
try:
    exec("signal.raise_signal(signal.SIGINT)")
except BaseException:
    pass
"""
"""A module that swallows what is raised as it is imported."""


def run(
    folder: Path, words: list[str], load: str = "pass", run: str = "pass", is_deaf: bool = False
) -> tuple[int, str]:
    """Exit status and standard error."""
    (folder / "entry.py").write_text(ENTRY.format(load=load, run=run))
    (folder / "deaf.py").write_text(DEAF)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_deaf else None
    try:
        line = [sys.executable, "-m", "entry", *words]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=60)
    finally:
        if is_deaf:
            signal.signal(signal.SIGINT, before)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["plan", "quality"])  # without an event loop, and with one
@pytest.mark.parametrize(
    "code",
    ["press()", "exec('press()')", "os.kill(os.getpid(), 2); time.sleep(60)"],
)
def test_wherever_it_comes_the_status_is_130(code: str, name: str, tmp_path: Path) -> None:
    assert run(tmp_path, [name], run=code) == (130, f"steelyard {name}: stopped\n")


def test_one_that_an_import_swallows_is_heeded_after_it(tmp_path: Path) -> None:
    assert run(tmp_path, ["plan"], run="import deaf; time.sleep(60)") == (130, "steelyard plan: stopped\n")
    for name in ("plan", "quality"):
        found = run(tmp_path, [name], load="import deaf", run="print('it began', file=sys.stderr)")
        assert found == (130, f"steelyard {name}: stopped\n")


def test_a_command_that_ends_before_it_is_heeded_has_its_status_too(tmp_path: Path) -> None:
    assert run(tmp_path, ["plan"], run="import deaf") == (130, "")


@pytest.mark.parametrize("code", ["press()", "sys.stderr = Press(); press()"], ids=["once", "and while it is told"])
def test_a_second_one_changes_nothing(code: str, tmp_path: Path) -> None:
    status, errors = run(tmp_path, ["quality"], run=f"atexit.register(press); {code}")
    assert status == 130 and "Traceback" not in errors and "Exception" not in errors


def test_on_the_way_out_it_is_130_and_at_the_very_end_what_it_was(tmp_path: Path) -> None:
    assert run(tmp_path, ["plan"], run="atexit.register(press)") == (130, "")
    assert run(tmp_path, ["plan"], run="sys.last = Last()") == (0, "")


def test_where_it_is_ignored_from_birth_it_stays_so(tmp_path: Path) -> None:
    assert run(tmp_path, ["plan"], run="press()", is_deaf=True) == (0, "")
