"""What a compiled Triton kernel needs of a GPU: registers, spills, shared memory, matrix instructions. No GPU needed:
with `compile_for` as the active target, `kernel.warmup(...)` on meta tensors compiles for a device that is not here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.runtime import driver

from steelyard.kernels.ahead import CompileOnly
from steelyard.kernels.gpu import Gpu

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one program: registers a thread, spilled bytes a thread, shared memory, and instruction counts in the PTX."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    num_wgmma: int
    num_mma: int

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.stack_bytes} B spilled, {self.shared_bytes / 1024:.0f} KiB shared, "
            f"{self.num_warps} warps, {self.num_wgmma} wgmma, {self.num_mma} mma"
        )


def compile_for(capability: int) -> None:
    """Make CUDA capability `capability` (90: Hopper) the target of every compilation of this process from here on."""
    gpu = Gpu(divmod(capability, 10), f"capability {capability}")
    driver.set_active(CompileOnly(gpu, Path()))  # nothing is launched, so no launcher is built in that folder


def resources(compiled: Any) -> Resources:
    """Read a compiled kernel (what `kernel.warmup` and a launch return)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([_TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+).*?STACK:(\d+)", usage.stdout + usage.stderr)
    assert found is not None, f"cuobjdump says nothing of registers: {usage.stderr}"
    ptx = compiled.asm["ptx"]
    return Resources(
        int(found[1]),
        int(found[2]),
        compiled.metadata.shared,
        compiled.metadata.num_warps,
        ptx.count("wgmma.mma_async"),
        len(re.findall(r"\bmma\.sync", ptx)),
    )
