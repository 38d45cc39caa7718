"""From logits to tokens: who needs what is known on the host, so a row pays only for what it asked.

    logits [S, V] --logprobs of who wants them--> raw
                  --penalties, bias, mask-------> only those rows
                  --argmax | Backend.choose-----> ids [S] --> the device's token table

A row's token depends on its own logits, seed and position, and on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.core.step import Want
from steelyard.kernels import step as columns
from steelyard.kernels.backend import Backend
from steelyard.kernels.sampling import Controls
from steelyard.runner.logprobs import TopLogprobs, pinned, top_logprobs
from steelyard.runner.philox import uniform_words
from steelyard.runner.rows import HostRow, Rows
from steelyard.runner.staging import Staging


@dataclass(frozen=True, slots=True)
class Job:
    """Sample one token of `row`, which will stand at `position`."""

    row: int
    position: int
    want: Want
    host: HostRow


@dataclass(frozen=True, slots=True)
class Sampled:
    """Device tensors of sampled jobs: ids int64 [S], `finite` bool [S] (False: the logits held NaN), logprobs."""

    jobs: tuple[Job, ...]
    ids: Tensor
    finite: Tensor
    logprobs: TopLogprobs | None
    logprob_jobs: tuple[int, ...]

    def to_host(self) -> Sampled:
        """The same in pinned host memory, without waiting: valid once an event recorded after this has passed."""
        found = None if self.logprobs is None else self.logprobs.to_host()
        return replace(self, ids=pinned(self.ids), finite=pinned(self.finite), logprobs=found)


class Sampler:
    """`stage` before the upload, then `run` on the logits. `name` keeps a step's two samplings apart."""

    def __init__(self, rows: Rows, backend: Backend, eos_ids: frozenset[int], vocab_size: int) -> None:
        self.rows = rows
        self.backend = backend
        self.eos_ids = sorted(eos_ids)
        self.vocab_size = vocab_size

    def stage(self, name: str, jobs: Sequence[Job], staging: Staging) -> None:
        """Everything the device must be told: rows, positions, uniforms, and lists of who needs which operation."""
        seeds = np.array([(j.host.sampling.seed or 0) % 2**64 for j in jobs], np.uint64)
        positions = np.array([j.position for j in jobs], np.int64)
        staging.add(f"{name}.rows", np.array([j.row for j in jobs], np.int32))
        staging.add(f"{name}.positions", positions.astype(np.int32))
        groups = _groups(jobs)
        for kind, wanted in groups.items():
            if wanted:
                staging.add(f"{name}.{kind}", np.array(wanted, np.int32))
        if groups["random"]:
            staging.add(f"{name}.u", uniform_words(seeds, positions).view(np.int32))
        at, values = self._biases(jobs)
        if at:
            staging.add(f"{name}.bias_at", np.array(at, np.int32))
            staging.add(f"{name}.bias", np.array(values, np.float32).view(np.int32))

    def run(
        self, name: str, jobs: Sequence[Job], logits: Tensor, staging: Staging, masks: dict[int, Any] | None = None
    ) -> Sampled:
        """Sample every job from logits [S, V] (overwritten), and append the ids to the token table."""
        best, ids = logits.max(dim=-1)
        wanting = [i for i, j in enumerate(jobs) if Want.TOP_LOGPROBS in j.want]
        raw = logits[staging[f"{name}.logprobs"]] if wanting else None
        if f"{name}.penalised" in staging:
            self._penalise(staging[f"{name}.penalised"].long(), name, jobs, logits, staging)
        if f"{name}.bias" in staging:
            bias = staging[f"{name}.bias"].view(torch.float32).to(logits.dtype)
            logits.view(-1).index_add_(0, staging[f"{name}.bias_at"].long(), bias)
        if masks:
            self._mask(jobs, logits, masks)
        if f"{name}.changed" in staging or masks:
            ids = logits.argmax(dim=-1)
        if f"{name}.random" in staging:
            at = staging[f"{name}.random"].long()
            ids = ids.index_copy(0, at, self._draw(at, name, jobs, logits, staging))
        row, position = staging[f"{name}.rows"].long(), staging[f"{name}.positions"].long()
        self.rows.append(row, position, ids)
        found = None
        if raw is not None:
            found = top_logprobs(raw, ids[staging[f"{name}.logprobs"]], max(_num_top(jobs[i]) for i in wanting))
        return Sampled(tuple(jobs), ids, best.isfinite(), found, tuple(wanting))

    def _draw(self, at: Tensor, name: str, jobs: Sequence[Job], logits: Tensor, staging: Staging) -> Tensor:
        rows = staging[f"{name}.rows"].long()[at]
        u = (staging[f"{name}.u"][at].long() & 0xFFFFFFFF).double() / 2**32
        drawn = [j.host.sampling for j in jobs if not j.host.sampling.greedy]
        controls = Controls(
            temperature=self.rows.column(rows, columns.TEMPERATURE),
            min_p=self.rows.column(rows, columns.MIN_P) if any(s.min_p > 0 for s in drawn) else None,
            top_k=self.rows.column(rows, columns.TOP_K) if any(s.top_k > 0 for s in drawn) else None,
            top_p=self.rows.column(rows, columns.TOP_P) if any(s.top_p < 1 for s in drawn) else None,
        )
        return self.backend.choose(logits[at], u, controls)

    def _penalise(self, at: Tensor, name: str, jobs: Sequence[Job], logits: Tensor, staging: Staging) -> None:
        """Repetition (Keskar et al., 2019) over prompt and output; frequency and presence over the output.

        Counts come from the token table, so nothing has to be restored after a preemption or a fork.
        """
        rows = staging[f"{name}.rows"].long()[at]
        length = staging[f"{name}.positions"].long()[at][:, None]
        longest = max(j.position for j in jobs if is_penalised(j))
        tokens = self.rows.tokens[rows, :longest].long()
        index = torch.arange(longest, device=tokens.device)
        known = index < length
        generated = known & (index >= self.rows.column(rows, columns.PROMPT_LEN)[:, None])
        some = logits[at]
        seen = torch.zeros_like(some).scatter_add_(1, tokens, known.to(some.dtype)) > 0
        counts = torch.zeros_like(some).scatter_add_(1, tokens, generated.to(some.dtype))
        repetition = self.rows.column(rows, columns.REPETITION)[:, None]
        some = torch.where(seen, torch.where(some > 0, some / repetition, some * repetition), some)
        some = some - self.rows.column(rows, columns.FREQUENCY)[:, None] * counts
        some = some - self.rows.column(rows, columns.PRESENCE)[:, None] * (counts > 0)
        logits.index_copy_(0, at, some)

    def _biases(self, jobs: Sequence[Job]) -> tuple[list[int], list[float]]:
        """Flat positions in logits [S, V] and what to add there: logit_bias, and -inf on ends that come too early."""
        at: list[int] = []
        values: list[float] = []
        for i, job in enumerate(jobs):
            sampling = job.host.sampling
            for token, bias in sampling.logit_bias:
                at.append(i * self.vocab_size + token)
                values.append(bias)
            if job.position - job.host.prompt_len < sampling.min_tokens:
                ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self.eos_ids))
                at += [i * self.vocab_size + token for token in sorted(ends) if token < self.vocab_size]
                values += [-np.inf] * (len(at) - len(values))
        return at, values

    def _mask(self, jobs: Sequence[Job], logits: Tensor, masks: dict[int, Any]) -> None:
        """Disallow tokens whose bit is clear; a mask is int32 [ceil(V / 32)], token t at bit t % 32 of word t // 32."""
        at = [i for i, j in enumerate(jobs) if j.row in masks]
        staging = Staging()
        staging.add("at", np.array(at, np.int32))
        staging.add("words", np.concatenate([np.asarray(masks[jobs[i].row]).view(np.int32) for i in at]))
        staging.upload(logits.device)
        bits = staging["words"].view(len(at), -1)
        token = torch.arange(self.vocab_size, device=logits.device)
        allowed = (bits[:, token >> 5] >> (token & 31)) & 1
        index = staging["at"].long()
        logits.index_copy_(0, index, logits[index].masked_fill(allowed == 0, -torch.inf))


def _groups(jobs: Sequence[Job]) -> dict[str, list[int]]:
    indexed = list(enumerate(jobs))
    penalised = [i for i, j in indexed if is_penalised(j)]
    changed = penalised + [i for i, j in indexed if j.host.sampling.logit_bias or is_too_early(j)]
    return {
        "logprobs": [i for i, j in indexed if Want.TOP_LOGPROBS in j.want],
        "penalised": penalised,
        "changed": changed,
        "random": [i for i, j in indexed if not j.host.sampling.greedy],
    }


def is_penalised(job: Job) -> bool:
    s = job.host.sampling
    return s.presence_penalty != 0 or s.frequency_penalty != 0 or s.repetition_penalty != 1


def is_too_early(job: Job) -> bool:
    return job.position - job.host.prompt_len < job.host.sampling.min_tokens


def _num_top(job: Job) -> int:
    return job.host.sampling.logprobs or 0
