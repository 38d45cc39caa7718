"""The scripts under benchmarks/ read their arguments as every command does: `--help` is help, and not where rows go."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_takes_its_arguments_by_their_place(name: str) -> None:
    tree = ast.parse((FOLDER / name).read_text())
    taken = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "sys.argv"]
    assert not taken, f"{name}, lines {taken}: give it an argparse parser"
    assert "ArgumentParser(" in (FOLDER / name).read_text()


@pytest.mark.parametrize("name", ["fp8_kv_gpu.py", "kernels_gpu.py"])
def test_help_is_help_and_makes_nothing(name: str, tmp_path: Path) -> None:
    line = [sys.executable, str(FOLDER / name), "--help"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {name} [-h] OUT"), done.stderr
    assert not list(tmp_path.iterdir())
