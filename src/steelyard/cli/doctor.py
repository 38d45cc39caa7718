"""`steelyard doctor`: examine this machine and print what was found. The examination is in steelyard.perf.doctor."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from steelyard.errors import InvalidRequest, SteelyardError

if TYPE_CHECKING:
    import torch

    from steelyard.perf.attention_cases import AttentionCase
    from steelyard.perf.doctor import Examination

PROMPT_TOKENS = 256
DEFAULT_MODEL = "smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--model", help="the model whose prefill and decode are profiled (default: smollm2)")
    parser.add_argument("--no-model", action="store_true", help="examine attention alone")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Examine and print. 0 if Steelyard's own attention runs here, and a model that was named too, else 1."""
    import torch

    from steelyard.perf.doctor import OURS, examine

    if args.device == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("--device cuda: torch sees no CUDA device here")
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    calls, trouble = ({}, "") if args.no_model else _model_calls(args.model or DEFAULT_MODEL, device)
    found = examine(device, _cases(device), calls)
    if trouble:
        found.findings.insert(0, trouble)
    print(json.dumps(found.to_dict(), indent=1) if args.json else "\n".join(_lines(found)))
    is_well = found.backends[OURS] is None and not (trouble and args.model)
    return 0 if is_well else 1


def _cases(device: torch.device) -> tuple[AttentionCase, ...]:
    import torch

    from steelyard.perf.attention_cases import AttentionCase

    if device.type == "cuda":
        heads, kv_heads, dim, length, rows, dtype = 32, 8, 128, 4096, 32, torch.bfloat16
    else:
        heads, kv_heads, dim, length, rows, dtype = 8, 2, 64, 1024, 8, torch.float32
    return (
        AttentionCase(1, length, length, heads, kv_heads, dim, True, dtype),
        AttentionCase(rows, 1, length, heads, kv_heads, dim, True, dtype),
    )


def _model_calls(model: str, device: torch.device) -> tuple[dict[str, Callable[[], object]], str]:
    """A prefill step and a decode step of a small model, each repeatable; or none, and a sentence that says why."""
    try:
        from steelyard.checkpoint.find import open_checkpoint
        from steelyard.runner.options import RunnerOptions
        from steelyard.runner.start import start_runner

        options = RunnerOptions(
            device=device.type, max_model_len=2 * PROMPT_TOKENS, max_num_seqs=1, max_num_batched_tokens=PROMPT_TOKENS,
            num_gpu_blocks_override=4 * PROMPT_TOKENS, overlap=False,
        )  # fmt: skip
        steps = _Steps(start_runner(open_checkpoint(model), options))
    except (SteelyardError, ImportError) as error:
        print(f"steelyard doctor: {model} is left out: {error}", file=sys.stderr)
        return {}, f"No model was profiled: {error}"
    names = (f"prefill of {PROMPT_TOKENS} tokens, {model}", f"decode, {model}")
    return dict(zip(names, (steps.prefill, steps.decode))), ""


class _Steps:
    """One row of a runner: `prefill` begins it again, `decode` adds a token to it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._next_id = 0
        self._length = 0

    def prefill(self) -> object:
        """All of the prompt in one step."""
        from steelyard.core.sampling import SamplingParams
        from steelyard.core.step import RowEnter, TableEdit

        caps = self._runner.caps
        blocks = tuple(range(1, 2 * PROMPT_TOKENS // caps.block_size + 1))
        prompt = tuple(range(1, PROMPT_TOKENS + 1))
        sampling = SamplingParams(max_tokens=PROMPT_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
        leave = (0,) if self._length else ()
        enter = (RowEnter(0, self._next_id, prompt, PROMPT_TOKENS, 0, sampling),)
        edits = tuple(TableEdit(group, 0, 0, blocks) for group in range(len(caps.groups)))
        self._length = PROMPT_TOKENS
        return self._step(0, PROMPT_TOKENS, enter=enter, leave=leave, edits=edits)

    def decode(self) -> object:
        """One token."""
        if not PROMPT_TOKENS <= self._length < 2 * PROMPT_TOKENS - 1:
            self.prefill()
        self._length += 1
        return self._step(self._length - 1, 1)

    def _step(self, start: int, num_new: int, **changes: Any) -> object:
        from steelyard.core.step import RowWork, StepPlan, Want

        plan = StepPlan(self._next_id, work=(RowWork(0, start, num_new, Want.TOKEN),), **changes)
        self._next_id += 1
        result = self._runner.collect(self._runner.launch(plan))
        assert not result.failed, f"the step failed: {result.failed}"
        return result


def _lines(found: Examination) -> list[str]:
    from steelyard.perf.kernel_report import HEADER, row_line

    lines = _machine_lines(found.environment)
    lines += ["", "libraries"]
    lines += [f"  {name:<16} {why or 'imports'}" for name, why in found.libraries.items()]
    lines += ["", f"attentions on this {found.device}"]
    lines += [f"  {name:<16} {why or 'runs'}" for name, why in found.backends.items()]
    lines += ["", "what really ran"]
    for ran in found.ran:
        lines.append(f"  {ran.what}: {ran.path}")
        lines += [f"    {k.total_us:>10.1f} us {k.count:>5} x {k.name[:90]}" for k in ran.kernels]
    lines += ["", "naive against the others (speed and memory are times better than naive)", f"  {HEADER}"]
    last = None
    for row in found.compared:
        if row.case is not last:
            lines.append(f"  {row.case}")
            last = row.case
        lines.append(f"  {row_line(row)}")
    lines += ["", "findings", *(f"  * {sentence}" for sentence in found.findings)]
    return lines


def _machine_lines(facts: dict[str, Any]) -> list[str]:
    cuda, gpu = facts["cuda"], facts["gpu"]
    features = " ".join(facts["cpu_features"])
    lines = [
        f"python {facts['python']}, torch {facts['torch']}, {facts['platform']}",
        f"cpu     {facts['cpu']}, {facts['cores']} cores, {facts['torch_threads']} torch threads, "
        f"torch uses {facts['torch_capability']}; {features or 'none of the wide instruction sets'}",
        f"cuda    {'; '.join(_cuda_words(cuda))}",
    ]
    if gpu is None:
        return [*lines, "gpu     none"]
    memory = gpu["memory_bytes"] / 2**30
    what = f"{gpu['name']}, {gpu['architecture']} {gpu['capability']}, {gpu['multiprocessors']} multiprocessors"
    return [*lines, f"gpu     {gpu['count']} x {what}, {memory:.1f} GiB"]


def _cuda_words(cuda: dict[str, Any]) -> list[str]:
    """What torch was built with, what the driver runs, and the compiler: each in words where it is missing."""
    driver, supports = cuda["driver"], cuda["driver_supports"]
    return [
        f"torch is built with CUDA {cuda['runtime']}" if cuda["runtime"] else "torch is built without CUDA",
        f"driver {driver}" + (f", which runs CUDA {supports}" if supports else "") if driver else "no driver",
        f"nvcc {cuda['nvcc']}" if cuda["nvcc"] else "no nvcc",
    ]
