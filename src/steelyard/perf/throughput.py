"""Offline measurements of a whole engine in this process: a workload's time, and its first and later tokens.

All requests are submitted at once, as token ids, end-of-text ignored, temperature 1. Times are wall time around the
engine's own loop; nothing is decoded to text.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from steelyard.core.sampling import SamplingParams
from steelyard.errors import InvalidRequest, NotFound, StartError
from steelyard.llm import LLM, Job, Progress
from steelyard.perf.steps import RecordingRunner
from steelyard.perf.workloads import Case
from steelyard.plan.costs import Setup, decode
from steelyard.plan.device import find_device
from steelyard.plan.formats import weight_format
from steelyard.plan.models import find_model
from steelyard.plan.roofline import Roofline


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a case. `first_s`: from submission until the first request's first token."""

    case: str
    seconds: float
    first_s: float
    prompt_tokens: int
    output_tokens: int
    ids_sha256: str
    steps: int
    device_s: float
    gap_s: float
    graphed: int

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first, where the case is a single request."""
        return (self.seconds - self.first_s) / max(self.output_tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a bench samples; the seed of request i is `seed` + i."""

    temperature: float = 1.0
    seed: int = 0


def record_steps(llm: LLM) -> RecordingRunner:
    """Put a recorder between the engine and its runner; steps of later runs are in its `steps`."""
    recorder = RecordingRunner(llm.engine.runner)
    llm.engine.runner = recorder
    return recorder


def jobs_of(case: Case, vocab_size: int, sampling: Sampling) -> list[Job]:
    """The case's requests."""
    return [
        Job(
            None,
            ids,
            SamplingParams(
                max_tokens=num_output, temperature=sampling.temperature, ignore_eos=True, seed=sampling.seed + i
            ),
        )
        for i, (ids, (_, num_output)) in enumerate(zip(case.prompts(vocab_size), case.lens))
    ]


def run_case(
    llm: LLM,
    case: Case,
    recorder: RecordingRunner,
    sampling: Sampling | None = None,
    show: Callable[[Progress], None] = lambda progress: None,
) -> Run:
    """Run a case once. Prefixes cached by an earlier run are forgotten first; every token that was asked for came.

    `show` is told how far it is after each step.
    """
    vocab_size = llm.engine.runner.caps.vocab_size
    jobs = jobs_of(case, vocab_size, sampling or Sampling())
    llm.engine.cache.drop()
    recorder.steps.clear()
    gc.collect()
    gc.freeze()
    firsts: list[float] = []
    began = time.perf_counter()

    def watch(progress: Progress) -> None:
        if progress.num_generated_tokens and not firsts:
            firsts.append(time.perf_counter() - began)
        show(progress)

    outputs = llm.complete(jobs, progress=watch)
    seconds = time.perf_counter() - began
    ids = [output.outputs[0].token_ids for output in outputs]
    assert [len(i) for i in ids] == [num_output for _, num_output in case.lens], "tokens are missing"
    steps = recorder.steps
    return Run(
        case=case.name,
        seconds=seconds,
        first_s=firsts[0],
        prompt_tokens=sum(num_prompt for num_prompt, _ in case.lens),
        output_tokens=case.output_tokens,
        ids_sha256=digest(ids),
        steps=len(steps),
        device_s=sum(row["device_ns"] for row in steps) / 1e9,
        gap_s=sum(row["gap_ns"] for row in steps[1:]) / 1e9,
        graphed=sum(bool(row["graph"]) for row in steps),
    )


def digest(ids: Sequence[Sequence[int]]) -> str:
    """SHA-256 over all tokens of all requests, in order."""
    total = hashlib.sha256()
    for of_request in ids:
        total.update(f"{len(of_request)}:{','.join(map(str, of_request))};".encode())
    return total.hexdigest()


def batch_case(batch: int, num_prompt: int, num_output: int) -> Case:
    """`batch` equal requests: a point of the batch curve."""
    return Case(f"batch {batch} {num_prompt}/{num_output}", ((num_prompt, num_output),) * batch)


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """A full decode step at one batch size: the middle one of a run.

    mfu, mbu       of the device's peaks; None where the planner knows the device or the model not
    launch_share   of the step's time that the device idles before it
    """

    batch: int
    step_ms: float
    tokens_per_s: float
    mfu: float | None
    mbu: float | None
    launch_share: float


def batch_point(recorder: RecordingRunner, batch: int, roofline: Roofline | None) -> BatchPoint:
    """The point of the last run. Raises InvalidRequest if no step had so many rows at once."""
    full = [r for r in recorder.steps if r["decode_rows"] == batch and "prefill_tokens" not in r]
    if not full:
        raise InvalidRequest(f"--batch {batch}: no step had so many rows; --max-num-seqs is less", param="batch")
    middle = sorted(full, key=lambda r: r["device_ns"] + r["gap_ns"])[len(full) // 2]
    step_s = (middle["device_ns"] + middle["gap_ns"]) / 1e9
    mfu = mbu = None
    if roofline is not None:
        chunks = decode(batch, middle["context_sum"] // batch)
        mfu, mbu = roofline.mfu(chunks, step_s), roofline.mbu(chunks, step_s)
    return BatchPoint(batch, step_s * 1e3, batch / step_s, mfu, mbu, middle["gap_ns"] / 1e9 / step_s)


def roofline_of(llm: LLM, model: str) -> Roofline | None:
    """The planner's view of `model` here; None on a CPU, or where it does not know the device or the model."""
    if not torch.cuda.is_available():
        return None
    try:
        device = find_device(torch.cuda.get_device_name())
        planned = find_model(model)
    except (StartError, NotFound):
        return None
    weights = weight_format(planned.shape.native_format) if llm.config.load_format == "dummy" else planned.stored
    return Roofline(Setup(planned.shape, device, weights))
