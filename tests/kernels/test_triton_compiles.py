"""Every shipped configuration compiles for sm_90a without spilling, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STACK_LIMIT_BYTES = {"prefill": 32, "prefill_hopper": 8}
"""Spills that were measured to be worth it: 128 registers let two prefill programs share a multiprocessor."""
SHARED_LIMIT_BYTES = 227 * 1024


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        "attention_common",
        "attention_sizes",
        "attention_options",
        "attention_fp8",
        "attention_fp8_more",
        "attention_bounded",
        "gluon",
        "layer",
        "tiles",
        "sampling",
        "moe",
    ],
)
def test_launches_compile_without_spills(case: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", case],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    for kernel in kernels:
        assert kernel["stack_bytes"] <= STACK_LIMIT_BYTES.get(kernel["kernel"], 0), kernel
        assert kernel["shared_bytes"] <= SHARED_LIMIT_BYTES, kernel
    hopper = [k for k in kernels if k["kernel"] == "prefill_hopper"]
    assert bool(hopper) == (case == "gluon")
    assert all(k["overlaps"] and k["wgmma"] and k["tma"] for k in hopper), "softmax no longer hides behind the product"
