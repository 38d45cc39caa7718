"""What a DeviceRunner works on, and a step of it in flight. Values alone: the work is in device_runner.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch

from steelyard.models.decoder import Decoder
from steelyard.plan.captures import Buckets
from steelyard.runner.device import DeviceStep
from steelyard.runner.frame import Slot
from steelyard.runner.graphs import Graph
from steelyard.runner.kv import KvPool
from steelyard.runner.results import Launched
from steelyard.runner.rows import Rows
from steelyard.runner.sampler import Job


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
class Enqueued(Launched):
    """A step in flight on a device that runs by itself.

    plain    the work items whose tokens arrive in the slot, in its order
    special  (work item, tokens before its last, job) of what the head does not sample
    """

    slot: Slot
    was_idle: bool
    before: tuple[torch.cuda.Event, torch.cuda.Event] | None
    _: KW_ONLY
    plain: Sequence[int] = ()
    special: list[tuple[int, int, Job]] = field(default_factory=list)
    wants_prompt: bool = False
    wants_pooled: bool = False
    error: str = ""
    graph: str = ""
    padded: tuple[int, int] = (0, 0)
