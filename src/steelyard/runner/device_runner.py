"""DeviceRunner: the Runner for a device that runs by itself. Its launch writes one buffer and enqueues; nothing waits.

    launch   write a slot -> one upload -> forward (graph or plain) -> head -> results to the slot -> event
    collect  wait for the event, read the slot; the one place that waits

Rows that ask for more than temperature and cuts (penalties, bias, log-probabilities, masks) are left out of the head
and sampled by plain operators behind it: only they pay for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from steelyard.core.step import (
    POOLED,
    MemoryTerms,
    RowOut,
    RunnerCaps,
    StepPlan,
    StepResult,
    StepTiming,
    Want,
)
from steelyard.runner.device import MAX_LOGIT_ROWS, Shape
from steelyard.runner.frame import NUM_SLOTS, Pairs, Slot, differences, split
from steelyard.runner.graphs import Graph, bucket_for
from steelyard.runner.launched import Enqueued, Machine
from steelyard.runner.logprobs import PromptScorer, pinned
from steelyard.runner.pooling import pooled
from steelyard.runner.results import NOT_FINITE, Results
from steelyard.runner.rows import HostRow
from steelyard.runner.sampler import Job, Sampler, is_penalised, is_too_early
from steelyard.runner.staging import Staging


class DeviceRunner:
    """Implements core.step.Runner. Built by runner/start_device.py."""

    def __init__(self, machine: Machine, caps: RunnerCaps, eos_ids: frozenset[int]) -> None:
        self._machine = machine
        self._caps = caps
        self._rows = machine.rows
        self._device = machine.rows.device
        self._frame = machine.step.layout
        self._slots = [Slot(self._frame, machine.step.frame) for _ in range(NUM_SLOTS)]
        self._sampler = Sampler(machine.rows, machine.decoder.place.backend, eos_ids, caps.vocab_size)
        self._special: set[int] = set()
        self._cuts: set[int] = set()
        self._score_prompts = PromptScorer(machine.rows, machine.decoder.logits, caps.vocab_size)
        self._in_flight: list[Enqueued] = []
        self._num_launched = 0
        self._last_done_ns = 0
        self._last_events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.attention = machine.decoder.place.backend.attention.name
        self.memory_terms: Callable[[], MemoryTerms] = lambda: MemoryTerms(0)
        self.start_seconds: dict[str, float] = {}
        self.kernels: dict[str, int] = {}

    @property
    def caps(self) -> RunnerCaps:
        return self._caps

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Enqueued:
        """Enqueue a step."""
        step = self._open(plan)
        slot = step.slot
        pairs = differences(plan.enter, plan.edits, self._rows.layout)
        if slot.events is not None:
            slot.events[0].record()
        if pairs is not None and len(pairs) > self._frame.max_patches:
            pairs = self._patch_ahead(pairs)
        shape, graph = self._lay_out(step)
        slot.write_patches(pairs)
        slot.upload()
        try:
            self._machine.kv.swap(plan.swaps)
            if plan.copies:
                self._copy(plan)
            if plan.num_drafts:
                step.drafts = self._copy_drafts(plan)
            self._run(step, shape, graph)
        except torch.OutOfMemoryError as error:
            self._fail(step, error)
            self._machine.step.patch()  # the next step may be launched before this one's failure is known
        self._close(step)
        self._in_flight.append(step)
        return step

    @torch.inference_mode()
    def sample(self, step: Enqueued, masks: dict[int, Any]) -> None:
        """Sample the plan's masked rows under their masks; see TorchRunner.sample."""
        if step.error:
            step.waiting = None
            return
        assert step.waiting is not None, "the plan has no masked rows, or they are sampled already"
        (jobs, logits), step.waiting = step.waiting, None
        staging = Staging()
        self._sampler.stage("masked", jobs, staging)
        staging.upload(self._device)
        try:
            step.sampled.append(self._sampler.run("masked", jobs, logits, staging, masks))
        except torch.OutOfMemoryError as error:
            self._fail(step, error)
        self._close(step)

    def collect(self, step: Enqueued) -> StepResult:
        """Wait for the step and read its results; steps are collected in launch order, once."""
        assert self._in_flight and self._in_flight[0] is step, "steps are collected in launch order"
        assert step.waiting is None, "masked rows were never sampled"
        self._in_flight.pop(0)
        timing = self._timing(step)
        step.slot.in_use = False
        ids = step.slot.ids[: len(step.plain)].tolist()
        if len(ids) == len(step.work) and not step.prompt and not step.pooled and (not ids or min(ids) >= 0):
            rows = [RowOut(w[0], h.epoch, (i,)) for w, h, i in zip(step.work, step.hosts, ids)]
            return StepResult(step.plan.id, tuple(rows), timing)
        read = Results(step.work, step.hosts)
        for at, token in zip(step.plain, ids):
            row = step.work[at].row
            if token >= 0:
                read.ids[row] = token
            else:
                read.failed[row] = NOT_FINITE
        read.take_all(step)
        if step.error:
            read.failed = {w.row: step.error for w in step.work}
        return read.result(step.plan.id, timing)

    def memory(self) -> MemoryTerms:
        """Where the device's memory is now."""
        return self.memory_terms()

    # launching

    @staticmethod
    def _fail(step: Enqueued, error: torch.OutOfMemoryError) -> None:
        """None of its rows gets anything."""
        step.error, step.plain, step.sampled = f"out of memory: {error}"[:300], (), []
        step.prompt, step.pooled, step.waiting = [], [], None
        torch.cuda.empty_cache()

    def _open(self, plan: StepPlan) -> Enqueued:
        """Bring the host's mirror up to the plan and take a slot."""
        host = self._rows.host
        for row in plan.leave:
            assert host[row] is not None, f"row {row} leaves and is empty"
            host[row] = None
            self._special.discard(row)
            self._cuts.discard(row)
        for e in plan.enter:
            assert host[e.row] is None, f"row {e.row} is entered twice"
            host[e.row] = HostRow(e.epoch, e.prompt_len, e.sampling)
            s = e.sampling
            if s.min_tokens or s.logit_bias or s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1:
                self._special.add(e.row)
            if not s.greedy and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0):
                self._cuts.add(e.row)
        slot = self._slots[self._num_launched % NUM_SLOTS]
        assert not slot.in_use, "more steps in flight than slots"
        self._num_launched += 1
        slot.in_use = True
        before, self._last_events = self._last_events, slot.events
        return Enqueued(plan, plan.work, [], time.monotonic_ns(), slot, not self._in_flight, before)

    def _lay_out(self, step: Enqueued) -> tuple[Shape, Graph | None]:
        """Write the work into the slot; its exact shape, and the graph of the bucket that holds it."""
        work, host, count = step.plan.work, self._rows.host, len(step.plan.work)
        rows, starts, news, wants, *_ = zip(*work) if work else ((), (), (), ())
        if news.count(1) == count and wants.count(Want.TOKEN) == count and not self._special and not step.plan.masked:
            step.hosts = cast(list[HostRow], [host[row] for row in rows])
            step.plain = range(count)
            step.slot.write_decode(rows, starts)
        else:
            step.work = work = tuple(sorted(work, key=lambda w: w.num_new > 1))
            step.hosts = cast(list[HostRow], [host[w.row] for w in work])
            self._divide(step)
            step.slot.write(work, step.plain)
        assert None not in step.hosts, "work for a row that nobody has entered"
        num_decode, num_tokens = news.count(1), sum(news)
        buckets = self._machine.buckets
        kind, largest = ("decode", count) if num_decode == count else ("mixed", num_tokens)
        size = bucket_for(buckets.decode if kind == "decode" else buckets.mixed, largest)
        graph = None if size is None else self._machine.graphs.get((kind, size))
        if size is None or graph is None:
            longest = max(map(sum, zip(starts, news)), default=0)
            return Shape(num_tokens, count, num_decode, max(news, default=1), longest), None
        step.graph = f"{kind} {size}"
        step.padded = (size - num_tokens, size - count if kind == "decode" else 0)
        return Shape(num_tokens, count, num_decode), graph

    def _divide(self, step: Enqueued) -> None:
        """Which work items the head samples, and which need more than it gives."""
        masked, plain = frozenset(step.plan.masked), list[int]()
        for i, (w, host) in enumerate(zip(step.work, step.hosts)):
            step.wants_prompt |= Want.PROMPT_LOGPROBS in w.want
            step.wants_pooled |= bool(w.want & POOLED)
            if Want.TOKEN not in w.want:
                continue
            end = w.start + w.num_new
            jobs = [(i, back, Job(w.row, end - back, w.want, host)) for back in range(w.num_drafts, -1, -1)]
            job = jobs[0][2]
            more = w.row in self._special and (is_penalised(job) or is_too_early(job) or host.sampling.logit_bias)
            if more or w.row in masked or Want.TOP_LOGPROBS in w.want or w.num_drafts:
                step.special += jobs
            else:
                plain.append(i)
        step.plain = plain

    def _patch_ahead(self, pairs: Pairs) -> Pairs:
        """More differences than a frame holds: all but the last frameful go ahead of it. Rare: many long prompts."""
        *ahead, rest = split(pairs, self._frame.max_patches)
        for part in ahead:
            words = torch.from_numpy(part).pin_memory() if self._device.type == "cuda" else torch.from_numpy(part)
            moved = words.to(self._device, non_blocking=True)
            self._rows.state.index_copy_(0, moved[:, 0].long(), moved[:, 1])
        return rest

    def _copy(self, plan: StepPlan) -> None:
        staging = Staging()
        self._machine.kv.stage(plan.copies, staging)
        staging.upload(self._device)
        self._machine.kv.copy(staging)

    def _copy_drafts(self, plan: StepPlan) -> Tensor | None:
        staging = Staging()
        self._rows.stage_drafts(plan.work, staging)
        staging.upload(self._device)
        return self._rows.copy_drafts(staging)

    def _run(self, step: Enqueued, shape: Shape, graph: Graph | None) -> None:
        if not step.work:
            return
        machine, count = self._machine, len(step.plain)
        if graph is not None:
            graph.replay()
        else:
            machine.step.forward(shape)
        if count:
            cut = bool(self._cuts) and any(step.work[i].row in self._cuts for i in step.plain)
            head = machine.graphs.get(("cut" if cut else "head", bucket_for(machine.buckets.decode, count) or count))
            if head is not None:
                head.replay()
            else:
                machine.step.head(count, cut)
            step.slot.result[:count].copy_(machine.step.sampling.result[:count], non_blocking=True)
        if step.special:
            self._sample_special(step)
        if step.wants_prompt:
            step.prompt = self._score_prompts(step.work, step.hosts, machine.step.hidden)
        if step.wants_pooled:
            step.pooled = pooled(step.work, machine.step.hidden)

    def _sample_special(self, step: Enqueued) -> None:
        """Rows with penalties, bias, log-probabilities, guesses or a mask: by plain operators, logits of their own."""
        masked, ends = frozenset(step.plan.masked), np.cumsum([w.num_new for w in step.work]) - 1
        plain = [(ends[i] - back, job) for i, back, job in step.special if job.row not in masked]
        later = [(ends[i] - back, job) for i, back, job in step.special if job.row in masked]
        for first in range(0, len(plain), MAX_LOGIT_ROWS):
            part, staging = plain[first : first + MAX_LOGIT_ROWS], Staging()
            jobs = [job for _, job in part]
            staging.add("last", np.array([at for at, _ in part], np.int32))
            self._sampler.stage("special", jobs, staging)
            staging.upload(self._device)
            step.sampled.append(self._sampler.run("special", jobs, self._logits(staging), staging))
        if later:
            staging = Staging()
            staging.add("last", np.array([at for at, _ in later], np.int32))
            staging.upload(self._device)
            step.waiting = ([job for _, job in later], self._logits(staging))

    def _logits(self, staging: Staging) -> Tensor:
        """float32 logits of the staged packed tokens."""
        hidden = self._machine.step.hidden.index_select(0, staging["last"].long())
        return self._machine.decoder.logits(hidden)

    def _close(self, step: Enqueued) -> None:
        """The last thing enqueued: results to the host, and the mark that `collect` waits for."""
        if step.waiting is not None:
            return
        if step.slot.events is not None:
            step.sampled = [s.to_host() for s in step.sampled]
            step.prompt = [(i, found.to_host()) for i, found in step.prompt]
            step.pooled = [(i, pinned(vector)) for i, vector in step.pooled]
            step.drafts = None if step.drafts is None else pinned(step.drafts)
            step.slot.events[1].record()
        step.done_ns = time.monotonic_ns()

    def _timing(self, step: Enqueued) -> StepTiming:
        """Waits. The gap is what the device idled between the step before and this one."""
        events, device_ns = step.slot.events, step.done_ns - step.launch_ns
        gap_ns = max(step.launch_ns - self._last_done_ns, 0) if self._last_done_ns else 0
        if events is not None:
            events[1].synchronize()
            step.done_ns = time.monotonic_ns()
            device_ns = int(events[0].elapsed_time(events[1]) * 1e6)
            gap_ns = 0 if step.before is None else max(int(step.before[1].elapsed_time(events[0]) * 1e6), 0)
        self._last_done_ns = step.done_ns
        cause = "no_work"
        if gap_ns:
            cause = "sync_wait" if not self._caps.overlaps else "no_work" if step.was_idle else "cpu_late"
        padded_tokens, padded_rows = step.padded
        return StepTiming(
            step.launch_ns, step.done_ns, device_ns, gap_ns, cause, step.graph, padded_tokens, padded_rows
        )
