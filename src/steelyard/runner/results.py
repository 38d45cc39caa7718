"""Host tensors of a finished step as plain values. A row with logits that are not finite fails alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from torch import Tensor

from steelyard.core.step import RowOut, RowWork, StepPlan, StepResult, StepTiming, TokenLogprobs
from steelyard.runner.logprobs import TopLogprobs, as_token_logprobs
from steelyard.runner.rows import HostRow
from steelyard.runner.sampler import Job, Sampled

NOT_FINITE = "the model's logits or hidden states are not finite"


@dataclass(slots=True)
class Launched:
    """A step in flight: its rows with their epochs, and the tensors its results will be read from.

    work     the plan's, in the order of the packed tokens
    drafts   int32, the guesses of rows that bring some, in the order of the plan
    prompt, pooled  (index of the work item, what was found)
    waiting  jobs whose grammar mask is not there yet, and their logits
    """

    plan: StepPlan
    work: Sequence[RowWork]
    hosts: Sequence[HostRow]
    launch_ns: int
    _: KW_ONLY
    sampled: list[Sampled] = field(default_factory=list)
    prompt: list[tuple[int, TopLogprobs]] = field(default_factory=list)
    pooled: list[tuple[int, Tensor]] = field(default_factory=list)
    drafts: Tensor | None = None
    waiting: tuple[list[Job], Tensor] | None = None
    done_ns: int = 0


class Results:
    """Collects what a step's rows produced; `ids` and `failed` may be written directly."""

    def __init__(self, work: Sequence[RowWork], hosts: Sequence[HostRow]) -> None:
        self._work = work
        self._hosts = hosts
        self.ids: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self._logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        self._later: dict[int, list[int]] = {}
        self._drafts: dict[int, list[int]] = {}
        self._prompt: dict[int, tuple[TokenLogprobs, ...]] = {}
        self._pooled: dict[int, tuple[float, ...]] = {}

    def take_all(self, step: Launched) -> None:
        """Whatever the step found, its tensors on the host."""
        for part in step.sampled:
            self.take(part)
        if step.drafts is not None:
            self.take_drafts(step.plan.work, step.drafts.tolist())
        for i, found in step.prompt:
            self.take_prompt(i, found)
        for i, vector in step.pooled:
            self.take_pooled(i, vector)

    def take(self, part: Sampled) -> None:
        """Sampled rows, their tensors on the host."""
        for job, token, finite in zip(part.jobs, part.ids.tolist(), part.finite.tolist()):
            if finite and job.row in self.ids:
                self._later.setdefault(job.row, []).append(token)
            elif finite:
                self.ids[job.row] = token
            else:
                self.failed[job.row] = NOT_FINITE
        if part.logprobs is not None:
            for at, (own, top_ids, values) in zip(part.logprob_jobs, part.logprobs.rows()):
                job = part.jobs[at]
                found = as_token_logprobs(own, top_ids, values, job.host.sampling.logprobs or 0)
                self._logprobs[job.row] = (*self._logprobs.get(job.row, ()), found)

    def take_drafts(self, work: Sequence[RowWork], drafts: list[int]) -> None:
        """The guesses that rows' sampled tokens are held against, one row's after another's in the order of `work`."""
        first = 0
        for item in work:
            if item.num_drafts:
                self._drafts[item.row] = drafts[first : first + item.num_drafts]
                first += item.num_drafts

    def take_prompt(self, index: int, found: TopLogprobs) -> None:
        """Prompt log-probabilities of work item `index`."""
        row, num_top = self._work[index].row, self._hosts[index].sampling.prompt_logprobs or 0
        if bool(found.own.isfinite().all()):
            self._prompt[row] = tuple(as_token_logprobs(*values, num_top) for values in found.rows())
        else:
            self.failed[row] = NOT_FINITE

    def take_pooled(self, index: int, values: Tensor) -> None:
        """The pooled float32 vector of work item `index`, on the host."""
        row = self._work[index].row
        if bool(values.isfinite().all()):
            self._pooled[row] = tuple(values.tolist())
        else:
            self.failed[row] = NOT_FINITE

    def result(self, step_id: int, timing: StepTiming) -> StepResult:
        """Every row that did not fail, in the order of the work."""
        rows = tuple(
            self._out(work.row, host.epoch)
            for work, host in zip(self._work, self._hosts)
            if work.row not in self.failed
        )
        return StepResult(step_id, rows, timing, self._prompt, self._pooled, tuple(self.failed.items()))

    def _out(self, row: int, epoch: int) -> RowOut:
        """Sampled ids up to the first that is not what was guessed for its place, that one included."""
        if row not in self.ids:
            return RowOut(row, epoch, ())
        ids: tuple[int, ...] = (self.ids[row],)
        if row in self._drafts:
            ids = (*ids, *self._later[row])
            right = [token == guess for token, guess in zip(ids, self._drafts[row], strict=False)]
            ids = ids[: 1 + (right.index(False) if False in right else len(right))]
        logprobs = self._logprobs.get(row)
        return RowOut(row, epoch, ids, None if logprobs is None else logprobs[: len(ids)])
