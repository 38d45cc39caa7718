"""Compile what a start on some GPU will launch, without that GPU: the start itself, on tensors that are not there.

every kernel once, on all cores     then the rest of a start, in its order: a larger pool, the largest step, all
                                    sizes that are captured; what only they launch is compiled too
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from steelyard.checkpoint.entry import Checkpoint
from steelyard.errors import StartError
from steelyard.kernels.ahead import compile_ahead, count_kernels, keep_kernels, kept_in, launching_nothing
from steelyard.kernels.gpu import Gpu
from steelyard.runner.options import RunnerOptions
from steelyard.runner.start_device import DeviceStart

MANY_BLOCKS = 4096
"""Of a pool as servers have it, as against the one block that a start's first steps run over."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """compiled, found: kernels by name, once for each form; nbytes: of all files in the folder."""

    compiled: tuple[str, ...]
    found: tuple[str, ...]
    seconds: float
    folder: Path
    nbytes: int


def compile_model(checkpoint: Checkpoint, options: RunnerOptions, gpu: Gpu) -> Compiled:
    """Every kernel of a server with these options, into options.kernel_cache (None: Triton's own folder).

    Raises StartError for options that have no kernels, a kernel that the GPU cannot have, or no C compiler.
    """
    if options.device == "cpu" or options.backend != "auto":
        raise StartError("kernels are compiled for GPUs: drop --device cpu and --deterministic", param="device")
    began = time.monotonic()
    keep_kernels(options.kernel_cache, only_binaries=True)
    kernels = count_kernels()
    with launching_nothing(gpu, is_here=False) as driver:
        driver.build_utilities()
        start = DeviceStart(checkpoint, replace(options, device="cuda"), gpu)
        compile_ahead(start.launch_all, gpu.arch)
        start.pool((MANY_BLOCKS,) * len(start.shape.kv_groups()))
        start.largest_step()
        for graph in start.capture(start.buckets()).values():
            graph.replay()
    folder = kept_in()
    return Compiled(
        tuple(sorted(kernels.compiled.values())),
        tuple(sorted(kernels.found.values())),
        time.monotonic() - began,
        folder,
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
    )
