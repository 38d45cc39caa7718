"""TorchRunner: obeys a StepPlan where launching is computing, on a CPU. It knows no request, no queue and no policy.

    launch   stage differences -> one upload -> tables -> expand -> forward -> logits of sampled rows -> sample
    sample   the rows whose grammar mask was not ready at launch
    collect  the one place that waits

A decode's input token is read from the device's token table, where the step before put it, so a step can be launched
before the one in front of it has been collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from steelyard.core.step import (
    MemoryTerms,
    RowWork,
    RunnerCaps,
    StepPlan,
    StepResult,
    StepTiming,
    Want,
)
from steelyard.models.decoder import Decoder
from steelyard.runner.inputs import Layout, expand, lay_out
from steelyard.runner.kv import KvPool
from steelyard.runner.logprobs import PromptScorer
from steelyard.runner.options import Limits
from steelyard.runner.pooling import pooled
from steelyard.runner.results import Launched, Results
from steelyard.runner.rows import HostRow, Rows
from steelyard.runner.sampler import Job, Sampler
from steelyard.runner.staging import Staging


@dataclass(slots=True)
class Computed(Launched):
    """A step in flight on a device where launching is computing."""

    layout: Layout


class TorchRunner:
    """Implements core.step.Runner over one decoder on one device. Built by runner/start.py."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KvPool,
        caps: RunnerCaps,
        limits: Limits,
        eos_ids: frozenset[int],
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._caps = caps
        self._device = decoder.place.device
        self._rows = Rows(limits, len(caps.groups), self._device)
        self._sampler = Sampler(self._rows, decoder.place.backend, eos_ids, caps.vocab_size)
        self._score_prompts = PromptScorer(self._rows, decoder.logits, caps.vocab_size)
        self._in_flight: list[Computed] = []
        self._last_done_ns = 0
        self.attention = decoder.place.backend.attention.name
        self.memory_terms: Callable[[], MemoryTerms] = lambda: MemoryTerms(0)
        self.start_seconds: dict[str, float] = {}

    @property
    def caps(self) -> RunnerCaps:
        return self._caps

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Computed:
        """Start a step. On a CPU it is computed here; its results are still read by `collect` only."""
        staging = Staging()
        self._rows.stage(plan, staging)
        self._kv.stage(plan.copies, staging)
        layout = lay_out(plan.work, staging)
        hosts = tuple(self._host(w) for w in layout.work)
        step = Computed(plan, layout.work, hosts, time.monotonic_ns(), layout)
        self._stage_fresh(layout, staging)
        plain, masked = self._jobs(step, frozenset(plan.masked))
        self._sampler.stage("plain", [job for _, job in plain], staging)
        staging.add("last_tokens", np.array([i for i, _ in plain + masked], np.int32))
        self._rows.stage_drafts(plan.work, staging)
        staging.upload(self._device)
        self._rows.apply(staging)
        step.drafts = self._rows.copy_drafts(staging)
        self._kv.swap(plan.swaps)
        self._clear_fresh(staging)
        self._kv.copy(staging)
        if layout.work:
            self._compute(step, plain, masked, staging)
        self._finish(step)
        self._in_flight.append(step)
        return step

    @torch.inference_mode()
    def sample(self, step: Computed, masks: dict[int, Any]) -> None:
        """Sample the plan's masked rows under their masks: row -> int32 words, bit t % 32 of word t // 32 allows t."""
        assert step.waiting is not None, "the plan has no masked rows, or they are sampled already"
        jobs, logits = step.waiting
        step.waiting = None
        staging = Staging()
        self._sampler.stage("masked", jobs, staging)
        staging.upload(self._device)
        step.sampled.append(self._sampler.run("masked", jobs, logits, staging, masks))
        self._finish(step)

    def collect(self, step: Computed) -> StepResult:
        """Wait for the step and read its results; steps are collected in launch order, once."""
        assert self._in_flight and self._in_flight[0] is step, "steps are collected in launch order"
        assert step.waiting is None, "masked rows were never sampled"
        self._in_flight.pop(0)
        device_ns = step.done_ns - step.launch_ns
        gap_ns = max(step.launch_ns - self._last_done_ns, 0) if self._last_done_ns else 0
        self._last_done_ns = step.done_ns
        timing = StepTiming(step.launch_ns, step.done_ns, device_ns, gap_ns, "cpu_late" if gap_ns else "no_work")
        read = Results(step.work, step.hosts)
        read.take_all(step)
        return read.result(step.plan.id, timing)

    def memory(self) -> MemoryTerms:
        """Where the device's memory is now."""
        return self.memory_terms()

    def _host(self, work: RowWork) -> HostRow:
        host = self._rows.host[work.row]
        assert host is not None, f"work for row {work.row}, which nobody has entered"
        return host

    def _stage_fresh(self, layout: Layout, staging: Staging) -> None:
        """Rows whose last block of this step holds nothing yet: it is cleared before use (see KvPool.clear)."""
        size = self._caps.block_size
        fresh = [(w.row, last) for w in layout.work if (last := (w.start + w.num_new - 1) // size) * size >= w.start]
        if fresh:
            staging.add("fresh_rows", np.array([row for row, _ in fresh], np.int32))
            staging.add("fresh_index", np.array([index for _, index in fresh], np.int32))

    def _clear_fresh(self, staging: Staging) -> None:
        if "fresh_rows" in staging:
            row, index = staging["fresh_rows"].long(), staging["fresh_index"].long()
            for group, table in enumerate(self._rows.tables):
                self._kv.clear(group, table[row, index].long())

    def _jobs(self, step: Computed, masked: frozenset[int]) -> tuple[list[tuple[int, Job]], list[tuple[int, Job]]]:
        """(packed index, job) of every token to sample: those that can be now, and those that wait for a mask.

        A row's last token, and the one before each guess.
        """
        found = [
            (step.layout.last_token(i) - back, Job(w.row, w.start + w.num_new - back, w.want, step.hosts[i]))
            for i, w in enumerate(step.layout.work)
            if Want.TOKEN in w.want
            for back in range(w.num_drafts, -1, -1)
        ]
        return [f for f in found if f[1].row not in masked], [f for f in found if f[1].row in masked]

    def _compute(
        self, step: Computed, plain: list[tuple[int, Job]], masked: list[tuple[int, Job]], staging: Staging
    ) -> None:
        batch = expand(step.layout, staging, self._rows, self._kv.layers)
        hidden = self._decoder.forward(batch)
        step.prompt = self._score_prompts(step.work, step.hosts, hidden)
        step.pooled = pooled(step.layout.work, hidden)
        if not plain and not masked:
            return
        logits = self._decoder.logits(hidden.index_select(0, staging["last_tokens"]))
        if masked:
            step.waiting = ([job for _, job in masked], logits[len(plain) :].clone())
        if plain:
            jobs = [job for _, job in plain]
            step.sampled.append(self._sampler.run("plain", jobs, logits[: len(plain)], staging))

    def _finish(self, step: Computed) -> None:
        """The step is computed, unless rows wait for their mask."""
        if step.waiting is None:
            step.done_ns = time.monotonic_ns()
