"""Offline measurements of a whole engine in this process: a workload's time, and its first and later tokens.

All requests are submitted at once, as token ids, end-of-text ignored, temperature 1. Times are wall time around the
engine's own loop; nothing is decoded to text.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.core.sampling import SamplingParams
from steelyard.llm import LLM, Job
from steelyard.perf.steps import RecordingRunner
from steelyard.perf.workloads import Case


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


def run_case(llm: LLM, case: Case, recorder: RecordingRunner, sampling: Sampling | None = None) -> Run:
    """Run a case once. Prefixes cached by an earlier run are forgotten first; every token that was asked for came."""
    vocab_size = llm.engine.runner.caps.vocab_size
    jobs = jobs_of(case, vocab_size, sampling or Sampling())
    llm.engine.cache.drop()
    recorder.steps.clear()
    gc.collect()
    gc.freeze()
    firsts: list[float] = []
    began = time.perf_counter()

    def watch(num_tokens: int) -> None:
        if num_tokens and not firsts:
            firsts.append(time.perf_counter() - began)

    outputs = llm.complete(jobs, progress=lambda progress: watch(progress.num_generated_tokens))
    seconds = time.perf_counter() - began
    ids = [output.outputs[0].token_ids for output in outputs]
    assert [len(i) for i in ids] == [num_output for _, num_output in case.lens], "tokens are missing"
    timings = [timing for _, timing in recorder.steps]
    return Run(
        case=case.name,
        seconds=seconds,
        first_s=firsts[0],
        prompt_tokens=sum(num_prompt for num_prompt, _ in case.lens),
        output_tokens=case.output_tokens,
        ids_sha256=digest(ids),
        steps=len(timings),
        device_s=sum(t.device_ns for t in timings) / 1e9,
        gap_s=sum(t.gap_ns for t in timings[1:]) / 1e9,
        graphed=sum(bool(t.graph) for t in timings),
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


def decode_ms(recorder: RecordingRunner, batch: int) -> float:
    """Median milliseconds from one full decode step's end to the next one's: its device time and the gap before it."""
    times = sorted(
        (timing.device_ns + timing.gap_ns) / 1e6
        for plan, timing in recorder.steps
        if len(plan.work) == batch and plan.num_tokens == batch
    )
    return times[len(times) // 2] if times else float("nan")
