"""docs/gpu.md, docs/attention.md and their pictures are what the kept results say: no figure there is by hand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def test_tables_and_picture_are_made_from_the_kept_results() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/gpu_page.py", "--check"], check=False)
    assert done.returncode == 0, "run tools/gpu_page.py"


def test_pictures_of_attention_are_made_from_kept_results_and_the_page() -> None:
    pictures: dict[str, str] = _tool("attention_pictures").pictures()
    assert len(pictures) == 4
    for name, svg in pictures.items():
        assert (ROOT / "docs/pictures" / name).read_text() == svg, f"{name}: run tools/attention_pictures.py"


def _tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_start_with_kernels_compiled_ahead_is_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    page = _tool("gpu_page")
    others = {name: page.kept(name) for name in ("h200.json", "h200-peers.json")}
    ahead = {"model": "llama3-8b", "case": "start with kernels compiled ahead", "ahead_start_s": 9.51}
    ahead |= {"phases": {"graphs": 2.0}, "kernels_compiled": 1, "kernels_from_cache": 37}
    measured = [row for row in others["h200.json"] if "ahead_start_s" not in row]
    monkeypatch.setattr(page, "kept", lambda name: others[name] if "peers" in name else measured)
    assert "ahead" not in page.start()
    measured.append(ahead)
    assert "| llama3-8b, 37 of 38 kernels compiled ahead | 9.5 | graphs 2.0 |" in page.start()
