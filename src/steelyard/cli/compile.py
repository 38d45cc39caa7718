"""`steelyard compile`: its flags, and what it made as a line. What is compiled: runner/compile.py."""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter

from steelyard.cli.options import add_engine_arguments, engine_config
from steelyard.errors import StartError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", required=True, metavar="SM", help="the GPU's compute capability, such as sm_90 for H100 and H200"
    )
    parser.add_argument("--json", action="store_true", help="print the names of the kernels too, as JSON")
    parser.epilog = (
        "The other flags are the server's: give those that it will have, for they decide which kernels it needs. "
        "Kernels go to --kernel-cache DIR, which may be moved. A server takes them only if its Python, Triton and "
        "steelyard are the very same files: compile in the image that serves."
    )
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compile, and say what there is now. Raises StartError."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = engine_config(args)
    if config.script is not None:
        raise StartError("--script answers without a model, and has no kernels", param="script")
    from steelyard.checkpoint.find import open_checkpoint
    from steelyard.engine.build import runner_options
    from steelyard.kernels.gpu import gpu_of_arch

    gpu = gpu_of_arch(args.arch)
    checkpoint = open_checkpoint(config.model, config.load_format)
    try:
        from steelyard.runner.compile import compile_model
    except ImportError as error:
        raise StartError(
            f"Triton is needed to compile its kernels (pip install triton==3.6.0, as the server has it): {error}"
        ) from None

    made = compile_model(checkpoint, runner_options(config), gpu)
    if args.json:
        kernels = {"compiled": Counter(made.compiled), "found": Counter(made.found)}
        print(json.dumps(kernels | {"seconds": made.seconds, "folder": str(made.folder), "bytes": made.nbytes}))
    else:
        print(
            f"{checkpoint.name} for {gpu.arch}: {len(made.compiled)} kernels compiled, {len(made.found)} found, "
            f"in {made.seconds:.1f} s; {made.nbytes / 1e6:.1f} MB in {made.folder}"
        )
    return 0
