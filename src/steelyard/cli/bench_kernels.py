"""`steelyard bench kernels`: its flags, and which cases they mean. The measuring is in steelyard.perf."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from steelyard.cli.values import new_file, whole, wholes
from steelyard.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

    from steelyard.perf.attention_cases import AttentionCase

PREFILL_TOKENS = {"cuda": 16384, "cpu": 0}
"""Batch x length of a prefill, held constant over lengths as the literature does; 0: one sequence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="of queries, keys and values",
    )
    parser.add_argument("--lengths", type=wholes(1), help="sequence lengths (GPU: 512 to 16384; CPU: 512, 1024, 2048)")
    parser.add_argument("--head-dims", type=wholes(1), help="head sizes (GPU: 64,128; CPU: 64)")
    parser.add_argument("--heads", type=whole(1), help="query heads (default: 2048 / head size; CPU: 8)")
    parser.add_argument("--kv-heads", type=wholes(1), help="KV heads, one table each (default: all, and a quarter)")
    parser.add_argument("--mask", default="causal", choices=("causal", "full", "both"), help="of prefills")
    parser.add_argument("--directions", default="forward,backward", help="forward, backward or both, comma-separated")
    parser.add_argument("--backends", help="comma-separated; default: all")
    parser.add_argument("--decode-batches", type=wholes(1), default=(1, 32), help="batch sizes of the decode cases")
    parser.add_argument("--no-decode", action="store_true", help="leave out the decode cases")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write environment, ceilings and rows")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a page with plots")


def run(args: argparse.Namespace) -> int:
    """Measure, print as rows arrive, and write what was asked for."""
    from steelyard.perf.attention_backends import NAMES
    from steelyard.perf.kernel_bench import Row, run_bench
    from steelyard.perf.kernel_report import case_line, ceiling_line, row_line, to_html, to_json

    device = _device(args.device)
    backends = NAMES if args.backends is None else _subset("backends", args.backends, NAMES)
    directions = _subset("directions", args.directions, ("forward", "backward"))
    above = [""]

    def show(row: Row) -> None:
        if case_line(row) != above[0]:
            above[0] = case_line(row)
            print(above[0])
        print(row_line(row), flush=True)

    cases = list(_cases(args, device))
    report = run_bench(cases, backends, directions, device, show)
    print("\n" + ceiling_line(report))
    for path, render in ((args.json, to_json), (args.html, to_html)):
        if path is not None:
            path.write_text(render(report))
            print(f"wrote {path}")
    return 0


def _cases(args: argparse.Namespace, device: torch.device) -> list[AttentionCase]:
    import torch

    from steelyard.perf.attention_cases import AttentionCase

    on_gpu = device.type == "cuda"
    name = args.dtype if args.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    dtype = getattr(torch, name)
    lengths = args.lengths or ([512, 1024, 2048, 4096, 8192, 16384] if on_gpu else [512, 1024, 2048])
    masks = {"causal": [True], "full": [False], "both": [True, False]}[args.mask]
    prefills, decodes = [], []
    for head_dim in args.head_dims or ([64, 128] if on_gpu else [64]):
        heads = args.heads or (2048 // head_dim if on_gpu else 8)
        for kv_heads in args.kv_heads or [heads, max(1, heads // 4)]:
            if heads % kv_heads:
                raise InvalidRequest(f"--kv-heads must divide the {heads} query heads, got {kv_heads}")
            shape = (heads, kv_heads, head_dim)
            total = PREFILL_TOKENS[device.type]
            prefills += [AttentionCase(max(1, total // n), n, n, *shape, c, dtype) for n in lengths for c in masks]
            if not args.no_decode:
                decodes += [AttentionCase(b, 1, n, *shape, True, dtype) for b in args.decode_batches for n in lengths]
    return prefills + decodes


def _device(name: str) -> torch.device:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("--device cuda: torch sees no CUDA device here; `steelyard doctor` says why")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _subset(flag: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(word.strip() for word in text.split(","))
    for word in chosen:
        if word not in allowed:
            raise InvalidRequest(f"--{flag} must be among {', '.join(allowed)}, got {word!r}")
    return tuple(word for word in allowed if word in chosen)
