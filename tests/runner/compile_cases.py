"""Kernels compiled ahead, and what a start then finds: one JSON line a case. A program of its own, outside Triton's
interpreter: `python -m tests.runner.compile_cases FOLDER`. Neither a GPU nor its driver is needed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton.backends.nvidia import driver as nvidia
from triton.runtime import build

from steelyard.checkpoint.find import open_checkpoint
from steelyard.kernels.ahead import CompileOnly, count_kernels, keep_kernels, launching_nothing
from steelyard.kernels.gpu import gpu_of_arch
from steelyard.runner import start_device
from steelyard.runner.compile import MANY_BLOCKS, compile_model
from steelyard.runner.device import Shape
from steelyard.runner.options import RunnerOptions

GPU = gpu_of_arch("sm_90")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
OPTIONS = RunnerOptions(load_format="dummy", max_num_seqs=20, max_num_batched_tokens=96)


def say(case: str, compiled: Any, found: Any, **more: Any) -> None:
    print(json.dumps({"case": case, "compiled": Counter(compiled), "found": Counter(found), **more}), flush=True)


def compiled(case: str, model: Any, options: RunnerOptions) -> None:
    made = compile_model(model, options, GPU)
    say(case, made.compiled, made.found, bytes=made.nbytes)


def started(case: str, model: Any, options: RunnerOptions) -> None:
    """All of a GPU's start and steps of every size, launch by launch, every layer, with Triton's own launcher class.

    Its C modules are looked up and not built or loaded, which needs libcuda.
    """
    launchers: list[str] = []
    patches: list[tuple[Any, str, Any]] = [
        (nvidia, "library_dirs", list),
        (build, "_load_module_from_path", lambda name, path: launchers.append(path) or SimpleNamespace(launch=None)),
        (build, "_build", lambda *args: sys.exit("a launcher was not found")),
        (start_device, "_kinds", lambda layers: layers),
        (CompileOnly, "build", lambda *args: sys.exit("not the real launcher")),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, stand_in in patches:
        setattr(owner, name, stand_in)
    keep_kernels(options.kernel_cache)
    kernels = count_kernels()
    with launching_nothing(GPU, is_here=False) as driver:
        driver.launcher_cls = lambda *given: (nvidia.CudaLauncher(*given), lambda *launch: None)[1]
        start = start_device.DeviceStart(model, options, GPU)
        start.launch_all()
        start.pool((MANY_BLOCKS,) * len(start.shape.kv_groups()))
        start.largest_step()
        graphs = start.capture(start.buckets())
        for graph in graphs.values():
            graph.replay()
        every_size(start)
    for owner, name, real in kept:
        setattr(owner, name, real)
    say(case, kernels.compiled.values(), kernels.found.values(), launchers=len(set(launchers)), graphs=len(graphs))


def stepped(case: str, model: Any, options: RunnerOptions) -> None:
    """Steps of every size and nothing of a start: what requests alone need."""
    keep_kernels(options.kernel_cache)
    kernels = count_kernels()
    with launching_nothing(GPU, is_here=False):
        start = start_device.DeviceStart(model, options, GPU)
        start.pool((MANY_BLOCKS,) * len(start.shape.kv_groups()))
        every_size(start)
    say(case, kernels.compiled.values(), kernels.found.values())


def every_size(start: start_device.DeviceStart) -> None:
    """Steps that no bucket was captured for, which run as they come."""
    max_rows = start.limits.max_rows
    for tokens in range(1, start.max_tokens + 1):
        for rows in {r for r in (1, 2, 3, 15, 16, 17, max_rows) if r <= min(tokens, max_rows)}:
            for num_decode in {0, 1, rows if rows == tokens else 0}:
                start.step.forward(Shape(tokens, rows, num_decode))
    for rows in range(1, max_rows + 1):
        for cut in (True, False):
            start.step.head(rows, cut)
    for cut in (True, False):
        start.choose(cut)


def main(folder: Path) -> None:
    model_folder, first, moved = folder / "model", folder / "first", folder / "moved"
    model_folder.mkdir()
    (model_folder / "config.json").write_text(json.dumps(CONFIG))
    model = open_checkpoint(str(model_folder), "dummy")
    compiled("empty folder", model, replace(OPTIONS, kernel_cache=str(first)))
    first.rename(moved)
    options = replace(OPTIONS, kernel_cache=str(moved))
    compiled("again, moved", model, options)
    started("start", model, options)
    fp8 = replace(options, kv_cache_dtype="fp8")
    compiled("fp8", model, fp8)
    started("start with fp8", model, fp8)
    compiled("blocks of 32", model, replace(options, block_size=32))
    for name in ("sdpa", "naive"):
        plain = replace(options, attention_backend=name)
        compiled(name, model, plain)
        stepped(f"steps with {name}", model, plain)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
