"""On a real GPU: every attention form against float32, repeated bit for bit, far pools, captured steps; experts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_every_check_of_the_kernel_benchmark_passes(tmp_path: Path) -> None:
    groups = ["checks_a", "checks_b", "checks_c", "sampling", "experts"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/kernels_gpu.py", tmp_path, *groups],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
