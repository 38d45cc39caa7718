"""What a DeviceRunner works on, and a step of it in flight. Values alone: the work is in device_runner.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steelyard.core.step import RowWork, StepPlan
from steelyard.models.decoder import Decoder
from steelyard.plan.captures import Buckets
from steelyard.runner.device import DeviceStep
from steelyard.runner.frame import Slot
from steelyard.runner.graphs import Graph
from steelyard.runner.kv import KvPool
from steelyard.runner.logprobs import TopLogprobs
from steelyard.runner.rows import HostRow, Rows
from steelyard.runner.sampler import Job, Sampled


@dataclass(frozen=True, slots=True)
class Machine:
    """What a DeviceRunner works on. `graphs`: by (kind, size); a kind that is missing runs by plain calls."""

    decoder: Decoder
    kv: KvPool
    rows: Rows
    step: DeviceStep
    buckets: Buckets
    graphs: Mapping[tuple[str, int], Graph]


@dataclass(slots=True)
class Launched:
    """A step in flight.

    plain    the work items whose tokens arrive in the slot, in its order
    special  (work item, tokens before its last, job) of what the head does not sample
    drafts   int32, the guesses of rows that bring some, in the order of the plan
    """

    plan: StepPlan
    work: Sequence[RowWork]
    hosts: list[HostRow]
    slot: Slot
    launch_ns: int
    was_idle: bool
    before: tuple[torch.cuda.Event, torch.cuda.Event] | None
    plain: Sequence[int] = ()
    special: list[tuple[int, int, Job]] = field(default_factory=list)
    drafts: Tensor | None = None
    wants_prompt: bool = False
    wants_pooled: bool = False
    sampled: list[Sampled] = field(default_factory=list)
    prompt: list[tuple[int, TopLogprobs]] = field(default_factory=list)
    pooled: list[tuple[int, Tensor]] = field(default_factory=list)
    waiting: tuple[list[Job], Tensor] | None = None
    error: str = ""
    done_ns: int = 0
    graph: str = ""
    padded: tuple[int, int] = (0, 0)
