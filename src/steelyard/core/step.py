"""One step: all that crosses between bookkeeping and machine. Plain frozen values; a log of plans replays.

    scheduler --StepPlan--> runner --StepResult--> scheduler

Rows and block tables travel as differences (`enter`, `leave`, `edits`); `work` is whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, NamedTuple, Protocol, TypeAlias

from steelyard.core.sampling import SamplingParams

Step: TypeAlias = Any
"""A launched step's handle: opaque to everyone but the runner that made it."""


class Want(Flag):
    """What a row's work must return besides its KV."""

    NOTHING = 0
    TOKEN = auto()  # sample after the last new token
    TOP_LOGPROBS = auto()  # of the sampled token
    PROMPT_LOGPROBS = auto()  # of every new position's next known token
    POOL_LAST = auto()  # the final hidden state of the last new token
    POOL_MEAN = auto()  # the mean of the final hidden states of the new tokens


POOLED = Want.POOL_LAST | Want.POOL_MEAN


@dataclass(frozen=True, slots=True)
class RowEnter:
    """A request takes a row: admitted, resumed, forked or swapped in alike. KV is valid below `start`.

    `tokens` are all known tokens (prompt and generated); `sampling` has n = 1 and a definite seed.
    """

    row: int
    epoch: int
    tokens: tuple[int, ...]
    prompt_len: int
    start: int
    sampling: SamplingParams


class RowWork(NamedTuple):
    """Compute positions [start, start + num_new) of a row. A decode's input may exist on the device only.

    The last num_drafts of them hold guesses: before the forward, the row's known tokens from `draft_from` on are copied
    there. Each position from the last known one on is sampled; `RowOut` has what agrees with the guesses, and one more.

    A named tuple, like `RowOut`: one is made per row and step, at a third of a frozen dataclass's price.
    """

    row: int
    start: int
    num_new: int
    want: Want
    num_drafts: int = 0
    draft_from: int = 0


@dataclass(frozen=True, slots=True)
class TableEdit:
    """Set entries [first_index, first_index + len(block_ids)) of a row's block table in one KV group.

    Entries behind a window become block 0, the null block.
    """

    group: int
    row: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy-on-write of a whole block, all layers of its group, before the forward and on the same stream."""

    group: int
    src_block: int
    dst_block: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Copy a whole block between the device and a slot of the host tier; `out` is device to host.

    A plan has every `out` before every `in`, and a device block or a host slot at most once among each.
    """

    group: int
    device_block: int
    host_slot: int
    out: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward. Applied in the order: leave, enter, edits, swaps, copies, then work.

    `masked` are the rows that wait for `Runner.sample` to bring a grammar mask; num_drafts is the sum over `work`.
    """

    id: int
    enter: tuple[RowEnter, ...] = ()
    leave: tuple[int, ...] = ()
    edits: tuple[TableEdit, ...] = ()
    copies: tuple[Copy, ...] = ()
    swaps: tuple[Swap, ...] = ()
    work: tuple[RowWork, ...] = ()
    masked: tuple[int, ...] = ()
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(w.num_new for w in self.work)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position: the token's own, and the best `top` as (id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RowOut(NamedTuple):
    """What a row produced: 0, 1 or (with drafts) 1 + accepted ids, and logprobs beside them if wanted."""

    row: int
    epoch: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Host clock at launch and completion; device time and the gap before the step, all nanoseconds."""

    launch_ns: int
    done_ns: int
    device_ns: int
    gap_ns: int = 0
    gap_cause: str = "no_work"  # no_work, cpu_late, sync_wait, copy_wait
    graph: str = ""  # the captured graph's name; empty: eager
    padded_tokens: int = 0
    padded_rows: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything a step gives back. `failed` rows (NaN, out of memory) get no tokens; the others go on.

    `pooled` has hidden-size values a row that wanted them, of this step's new positions alone.
    """

    id: int
    rows: tuple[RowOut, ...]
    timing: StepTiming
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    pooled: dict[int, tuple[float, ...]] = field(default_factory=dict)
    failed: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table. `window` is the attention window in tokens, None for full attention.

    keep_first  positions below it are seen behind the window too, and their blocks stay
    """

    num_layers: int
    window: int | None = None
    keep_first: int = 0


@dataclass(frozen=True, slots=True)
class RunnerCaps:
    """What a runner can hold. `num_blocks[g]` counts group g's usable blocks, numbered from 1 (0 is the null block).

    num_host_blocks  the same of the host tier's slots; empty where there is none
    host_bandwidth   bytes/s one way between them and the device, measured at the start
    checks_drafts    rows may bring guesses (RowWork.num_drafts)
    """

    block_size: int
    num_blocks: tuple[int, ...]
    groups: tuple[KvGroup, ...]
    max_rows: int
    max_model_len: int
    max_batched_tokens: int
    vocab_size: int
    overlaps: bool
    fingerprint: str
    kv_layout: str
    checks_drafts: bool = False
    num_host_blocks: tuple[int, ...] = ()
    host_bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """The device's memory, each term by difference at a named moment, in bytes. The terms sum to `total_bytes`."""

    total_bytes: int
    context_bytes: int = 0
    weights_bytes: int = 0
    kv_pool_bytes: int = 0
    activation_peak_bytes: int = 0
    graphs_bytes: int = 0
    communication_bytes: int = 0
    allocator_slack_bytes: int = 0
    free_bytes: int = 0


class Runner(Protocol):
    """Obeys plans in order.

    Implemented by DeviceRunner (a GPU), TorchRunner (a CPU), ShadowRunner (the oracle) and ScriptedRunner.
    """

    @property
    def caps(self) -> RunnerCaps: ...

    def launch(self, plan: StepPlan) -> Step:
        """Apply the differences and start the step. Never waits where `caps.overlaps`; else it may compute."""
        ...

    def sample(self, step: Step, masks: dict[int, Any]) -> None:
        """Only if the plan has `masked` rows: row -> allowed-token bitmask. Enqueues their sampling."""
        ...

    def collect(self, step: Step) -> StepResult:
        """Wait for a launched step: the one place that waits. Steps are collected in launch order."""
        ...

    def memory(self) -> MemoryTerms: ...
