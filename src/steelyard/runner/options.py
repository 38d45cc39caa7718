"""What an operator chose for the machine, and what None becomes: device, dtype, sizes. No model is loaded here."""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass

import torch

from steelyard.errors import StartError
from steelyard.kernels.cpu_linear import has_int4
from steelyard.kernels.gpu import Gpu
from steelyard.kernels.kv_fp8 import FP8
from steelyard.plan.defaults import BY_DEVICE

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """The fields of EngineConfig that a runner needs, with the same names and meanings.

    swap_space_bytes  of the host tier; 0: none
    overlap   results are collected after the next launch; None: where the device runs by itself
    backend   auto, or the name of one (reference: slow and exact, for tests; invariant: see kernels/invariant.py)
    kv_cache_dtype  auto: what the backend computes in; fp8: see kernels/kv_fp8.py
    kv_window, kv_sinks  attention sees the latest kv_window positions and the first kv_sinks; None: all
    kernel_cache  a folder of compiled kernels; None: Triton's own
    whole_prompts  a step must be able to hold a request of the full context
    kv_allocation  paged, or one of those that reserve a request's blocks when it is admitted
    serves  requests wait once it has started: a kernel that is compiled only then is warned of
    """

    dtype: str = "auto"
    load_format: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    overlap: bool | None = None
    swap_space_bytes: int = 0
    seed: int = 0
    backend: str = "auto"
    attention_backend: str = "auto"
    whole_prompts: bool = False
    kv_allocation: str = "paged"
    kv_cache_dtype: str = "auto"
    kv_window: int | None = None
    kv_sinks: int | None = None
    kernel_cache: str | None = None
    serves: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Definite sizes of a runner."""

    max_model_len: int
    max_rows: int
    max_batched_tokens: int
    block_size: int
    overlaps: bool


GPU_ONLY = {
    "kernel_cache": ("--kernel-cache", "kernels are compiled for GPUs"),
    "enforce_eager": ("--enforce-eager", "CUDA graphs are captured on GPUs"),
}
"""Options that a CPU's start does not read: the flag, and why."""


def say_unused(options: RunnerOptions) -> None:
    """Warn of every option that was given and has no effect on a CPU, in a line each."""
    for name, (flag, why) in GPU_ONLY.items():
        if getattr(options, name):
            _log.warning("%s is not used: %s, and this model runs on a CPU", flag, why)


def resolve_device(name: str) -> torch.device:
    """--device as a torch device. Raises StartError where CUDA is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise StartError("--device cuda: torch finds no CUDA device here; use --device cpu", param="device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device, kinds: Set[str]) -> torch.dtype:
    """--dtype as a torch type; `kinds` are those of the checkpoint's tensors.

    auto is bfloat16 on a GPU. On a CPU it is bfloat16 too where the CPU multiplies it natively and the checkpoint's
    matrices are narrower than float32 anyway; else float32, which rounds nothing.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16
    narrow = bool(kinds - {"F32", "F64"})
    chosen = torch.bfloat16 if narrow and has_native_bfloat16() else torch.float32
    if chosen is torch.bfloat16:
        _log.info(
            "--dtype auto: bfloat16 products, attention and KV, float32 sums between layers, 4- or 8-bit weights %s; "
            "--dtype float32 rounds nothing",
            "packed where few rows are computed" if has_int4() else "unpacked (this torch has no int4 operators)",
        )
    else:
        why = "the checkpoint's own" if not narrow else "this CPU has no bfloat16 arithmetic"
        _log.info("--dtype auto: float32 (%s)", why)
    return chosen


def resolve_kv_dtype(options: RunnerOptions, wide: torch.dtype, gpu: Gpu | None, attention: str) -> torch.dtype:
    """--kv-cache-dtype as a torch type; `wide` is what the backend computes in, `attention` the one chosen for it.
    `gpu`: None on a CPU.

    Raises StartError.
    """
    if options.kv_cache_dtype == "auto":
        return wide
    if attention in ("sdpa", "naive"):
        asked = options.attention_backend != "auto"
        raise StartError(
            f"--kv-cache-dtype fp8: attention backend {attention!r} reads no fp8 pool; "
            + ("use --attention-backend auto" if asked else "this model gets no other here, use --kv-cache-dtype auto"),
            param="kv_cache_dtype",
        )
    if gpu is not None and gpu.capability < (8, 9):
        raise StartError(
            "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or newer; use auto", param="kv_cache_dtype"
        )
    return FP8


def check_invariant(device: torch.device) -> None:
    """Raises StartError where --deterministic would land on a GPU; what else it excludes, the configuration knows."""
    if device.type == "cuda":
        raise StartError("--deterministic runs on a CPU; add --device cpu", param="device")


def has_native_bfloat16() -> bool:
    """Whether this CPU has bfloat16 products (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def resolve_limits(options: RunnerOptions, device: torch.device, context: int) -> Limits:
    """Defaults by device; `context` is how many positions the model was trained for.

    Raises StartError for a --max-model-len beyond it.
    """
    on_gpu, defaults = device.type == "cuda", BY_DEVICE[device.type]
    max_model_len = options.max_model_len or context
    if max_model_len > context:
        raise StartError(
            f"--max-model-len {max_model_len} is more than the model's {context} positions; ask for at most that",
            param="max_model_len",
        )
    max_batched_tokens = options.max_num_batched_tokens or defaults.max_num_batched_tokens
    if options.whole_prompts and max_batched_tokens < max_model_len:
        if options.max_num_batched_tokens is not None:
            raise StartError(
                f"--max-num-batched-tokens {max_batched_tokens} is less than the context of {max_model_len}: without "
                "chunked prefill or KV cache a step must hold a whole request; raise it or lower --max-model-len",
                param="max_num_batched_tokens",
            )
        max_batched_tokens = max_model_len
    return Limits(
        max_model_len=max_model_len,
        max_rows=options.max_num_seqs or defaults.max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        block_size=options.block_size or defaults.block_size,
        overlaps=on_gpu if options.overlap is None else options.overlap,
    )
