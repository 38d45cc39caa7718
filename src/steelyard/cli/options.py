"""The engine's flags, shared by every command that runs one; names and meanings are vLLM's where they exist there."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields

from steelyard.config import (
    ATTENTION_BACKENDS,
    BATCHINGS,
    DEVICES,
    DTYPES,
    KV_ALLOCATIONS,
    KV_CACHE_DTYPES,
    KV_CACHES,
    LOAD_FORMATS,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from steelyard.errors import StartError

_UNITS = {
    "": 1,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_size(text: str) -> int:
    """Bytes: `4096`, `1GiB` or `1G` (powers of 1024), `1.5GB` or `1.5g` (powers of 1000).

    Raises argparse.ArgumentTypeError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    number, unit = match.groups() if match else ("", "?")
    factor = _UNITS.get(unit, _UNITS.get(unit.lower()) if len(unit) > 1 else None)
    if factor is None:
        raise argparse.ArgumentTypeError(f"must be bytes, or a number with MiB, GiB, MB or GB, got {text!r}")
    return int(float(number) * factor) if "." in number else int(number) * factor


def add_engine_arguments(parser: argparse.ArgumentParser, *, positional_model: bool = True) -> None:
    """Add every flag of EngineConfig. A flag that is not given leaves its field's default."""
    if positional_model:
        parser.add_argument(
            "model_positional", nargs="?", metavar="MODEL", help="the same as --model", default=argparse.SUPPRESS
        )
    group = parser.add_argument_group("engine", argument_default=argparse.SUPPRESS)
    add = group.add_argument
    add("--model", metavar="MODEL", help="directory, GGUF file, hub id, or smollm2 (default: smollm2)")
    add(
        "--dtype",
        choices=DTYPES,
        help="of weights and KV cache (default: auto, bfloat16 wherever the device multiplies it)",
    )
    add("--load-format", choices=LOAD_FORMATS, help="of the weights; dummy: random ones (default: auto)")
    add("--device", choices=DEVICES, help="(default: a GPU if there is one)")
    add("--max-model-len", type=int, metavar="TOKENS", help="prompt and output together (default: the model's)")
    add("--max-num-seqs", type=int, metavar="N", help="requests that run at once")
    add("--max-num-batched-tokens", type=int, metavar="TOKENS", help="the token budget of one step")
    add("--block-size", type=int, metavar="TOKENS", help="of a KV block, a power of two")
    add("--num-gpu-blocks-override", type=int, metavar="N", help="size of the KV pool in blocks, on a CPU too")
    add("--kv-cache-memory-bytes", type=parse_size, metavar="SIZE", help="size of the KV pool, such as 1GiB")
    add("--swap-space", type=float, metavar="GIB", help="host memory for KV that has to leave the device (default: 0)")
    add("--gpu-memory-utilization", type=float, metavar="SHARE", help="of the device's memory, for everything")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="keep the KV of finished requests for later ones with the same beginning (default: on)",
    )
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="fp8: one byte a number (default: auto, as computed)")
    add("--kv-window", type=int, metavar="TOKENS", help="forget all but the latest tokens and the sinks (default: off)")
    add("--kv-sinks", type=int, metavar="TOKENS", help="first tokens kept beside --kv-window (default: 4)")
    add("--kernel-cache", metavar="DIR", help="compiled GPU kernels: used, and added to (default: Triton's own folder)")
    add("--enforce-eager", action="store_true", help="capture no CUDA graphs")
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan a step while the one before it runs (default: on a GPU)",
    )
    add("--scheduling-policy", choices=SCHEDULING_POLICIES, help="who goes first (default: fcfs; see docs/serving.md)")
    add("--num-speculative-tokens", type=int, metavar="N", help="guess from the request's own text (default: 0, off)")
    add("--speculative-load", type=int, metavar="TOKENS", help="guess only while a step has fewer (default: 4)")
    add("--deterministic", action="store_true", help="the same bits for a request in any company; slow, CPU only")
    add("--seed", type=int, metavar="N", help="of requests that bring none, and of dummy weights (default: 0)")
    add("--skip-tokenizer-init", action="store_true", help="token ids in, token ids out")
    add("--check-invariants", action="store_true", help="check the engine's books after every step; slow")
    add("--script", metavar="FILE", help="answer with token ids from a JSON file in place of a model")
    add("--attention-backend", choices=ATTENTION_BACKENDS, help="(default: auto, by device, heads and blocks)")
    _add_baselines(parser)


def _add_baselines(parser: argparse.ArgumentParser) -> None:
    """Older ways to serve, to compare with: same tokens, other times."""
    add = parser.add_argument_group("baselines", argument_default=argparse.SUPPRESS).add_argument
    add("--batching", choices=BATCHINGS, help="who may join when (default: continuous)")
    add("--batch-size", type=int, metavar="N", help="of a static or dynamic batch (default: --max-num-seqs)")
    add("--batch-timeout", type=float, metavar="SECONDS", help="to wait for a batch to fill (static: 0, dynamic: 0.05)")
    add(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        help="compute a long prompt over several steps (default: on)",
    )
    add("--kv-cache", choices=KV_CACHES, help="off: compute every sequence anew in every step (default: on)")
    add(
        "--kv-allocation", choices=KV_ALLOCATIONS, help="contiguous: reserve a request's KV in one run (default: paged)"
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The flags as an EngineConfig. Raises StartError for a value out of range or two different models."""
    given = {f.name: getattr(args, f.name) for f in fields(EngineConfig) if hasattr(args, f.name)}
    positional = getattr(args, "model_positional", None)
    if positional is not None and given.setdefault("model", positional) != positional:
        raise StartError(f"two models are named, {positional} and --model {given['model']}: give one")
    return EngineConfig(**given)
