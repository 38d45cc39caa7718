"""docs/gpu.md, docs/attention.md and their picture are what the kept results say: no figure there is by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tables_and_picture_are_made_from_the_kept_results() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/gpu_page.py", "--check"], check=False)
    assert done.returncode == 0, "run tools/gpu_page.py"
