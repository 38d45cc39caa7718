"""Compile every launch of a block for sm_90a on a machine without a GPU, and read the resources off the cubin.

Run as a program: `python -m tests.kernels.compiling NAME` compiles the cases of that name and prints one JSON line a
kernel.
Tensors live on torch's meta device, the driver is kernels/ahead.py's, and JITFunction.run only compiles.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from steelyard.kernels.ahead import CompileOnly
from steelyard.kernels.gpu import gpu_of_arch

META = torch.device("meta")
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


compiled: dict[str, tuple[str, Any]] = {}


def compile_only() -> None:
    """From here on, launching a kernel compiles it and remembers the result."""
    driver.set_active(CompileOnly(gpu_of_arch("sm_90"), Path()))
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled[kernel.hash] = (self.__name__, kernel)
        return kernel

    JITFunction.run = run


def resources(kernel: Any) -> dict[str, int]:
    """Registers, stack bytes (spills), shared bytes and instruction counts of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+).*?STACK:(\d+)", usage.stdout + usage.stderr)
    assert found is not None, usage.stdout
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tma": ptx.count("cp.async.bulk.tensor"),
    }


def sass(kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([BIN / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout


def softmax_overlaps(kernel: Any) -> bool:
    """Whether, in each steady loop, the softmax (MUFU.EX2) lies between the wait for QK and the wait for PV.

    ptxas likes to hoist the second wait over the softmax, and then nothing overlaps.
    """
    events = re.findall(r"(MUFU\.EX2|WARPGROUP\.DEPBAR\.LE gsb0, 0x[01])", sass(kernel))
    overlapped, since_first_wait = 0, None
    for event in events:
        if event.endswith("0x1"):
            since_first_wait = 0
        elif event.endswith("0x0"):
            overlapped += since_first_wait is not None and since_first_wait >= 32
            since_first_wait = None
        elif since_first_wait is not None:
            since_first_wait += 1
    return overlapped >= 2


def main(cases: dict[str, Callable[[], None]], name: str) -> None:
    compile_only()
    cases[name]()
    for fn, kernel in compiled.values():
        row = {"kernel": fn, **resources(kernel)}
        if fn == "prefill_hopper":
            row["overlaps"] = softmax_overlaps(kernel)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    from tests.kernels import compile_cases

    main(compile_cases.CASES, sys.argv[1])
