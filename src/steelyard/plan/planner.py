"""The whole plan for one model on one device: options in, numbers out. No text, no files but the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from steelyard.errors import StartError
from steelyard.plan.calibration import Calibration, default_calibration
from steelyard.plan.capacity import Capacity, Change, Price, capacity, price, sensitivity
from steelyard.plan.captures import NOTHING, Buckets
from steelyard.plan.costs import Chunk, Setup, decode, prefill
from steelyard.plan.defaults import ON_GPU
from steelyard.plan.device import Device
from steelyard.plan.fit import fit
from steelyard.plan.formats import kv_dtype_bytes, weight_format
from steelyard.plan.memory import MIB, KvPools, MemoryBudget, activation_peak_bytes, graphs_bytes
from steelyard.plan.models import PlannedModel
from steelyard.plan.records import StepRecord
from steelyard.plan.roofline import Roofline, StepTime
from steelyard.plan.service import Limits, Service
from steelyard.plan.shape import ModelShape
from steelyard.plan.times import Estimate, Floor, Reach
from steelyard.plan.workload import Slo, Workload

CONTEXT_BYTES = 850 * MIB
"""Driver context, libraries and allocator of a CUDA process; measured on several cards at 0.5 to 0.9 GiB."""
COMMUNICATION_BYTES = 256 * MIB
"""Buffers of a rank that talks to others."""
BATCHES = (1, 8, 32, 128, 256)
PREFILLS = (256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Options:
    """What to plan for. None: decided here.

    dtype        of weights; None: as stored
    contexts     tokens of a sequence in the decode table, the first of them also in the memory table; empty: the
                 load's input and output, or 4,096
    share        of the device's memory for everything
    """

    device: Device
    tp: int = 1
    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    contexts: tuple[int, ...] = ()
    share: float = ON_GPU.gpu_memory_utilization
    block_size: int = ON_GPU.block_size
    max_num_seqs: int = ON_GPU.max_num_seqs
    max_num_batched_tokens: int = ON_GPU.max_num_batched_tokens
    enforce_eager: bool = False
    batches: tuple[int, ...] = BATCHES
    load: Workload | None = None
    slo: Slo = field(default_factory=Slo)
    replicas: int | None = None
    price_per_hour: float | None = None
    records: tuple[StepRecord, ...] = ()

    def __post_init__(self) -> None:
        counts = ("tp", "block_size", "max_num_seqs", "max_num_batched_tokens", "replicas")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "tensor-parallel-size" if name == "tp" else name.replace("_", "-")
                raise StartError(f"--{flag} must be at least 1, got {value}", param=name)
        if not 0.0 < self.share <= 1.0:
            raise StartError(f"--gpu-memory-utilization must be in (0, 1], got {self.share:g}", param="share")
        for flag, values in (("batch", self.batches), ("context", self.contexts)):
            if any(v < 1 for v in values):
                raise StartError(f"--{flag} must be at least 1, got {min(values)}", param=flag)
        if self.block_size & (self.block_size - 1):
            raise StartError(f"--block-size must be a power of two, got {self.block_size}", param="block_size")
        if self.price_per_hour is not None and not 0.0 <= self.price_per_hour < float("inf"):
            raise StartError(f"--price-per-hour must be at least 0, got {self.price_per_hour:g}", param="price")


@dataclass(frozen=True, slots=True)
class StepRow:
    """A line of the decode or prefill table; `reach` None: no ceilings were measured.

    terms   seconds of each of calibration.TERMS; they sum to `estimate`
    """

    batch: int
    num_tokens: int
    context_len: int
    time: StepTime
    floor: Floor
    reach: Reach | None
    estimate: Estimate
    terms: Mapping[str, float]
    fits: bool
    mbu: float
    mfu: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything `steelyard plan` says of one configuration. `capacity` None: no load was given, or it does not fit."""

    model: PlannedModel
    options: Options
    setup: Setup
    context_len: int
    buckets: Buckets
    budget: MemoryBudget
    pools: KvPools
    num_blocks: tuple[int, ...]
    calibration: Calibration
    decodes: tuple[StepRow, ...]
    prefills: tuple[StepRow, ...]
    capacity: Capacity | None
    changes: tuple[Change, ...]
    price: Price | None
    service: Service | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the weights and at least one block of KV fit."""
        return min(self.num_blocks) >= 1

    @property
    def max_sequences(self) -> int:
        """Sequences of `context_len` tokens that the pool holds at once, each at its full length."""
        return self.pools.max_sequences(self.num_blocks, self.context_len) if self.fits else 0

    @property
    def max_context(self) -> int:
        """Tokens of the longest single sequence that fits the pool's bytes, whatever the model's own limit."""
        return self.pools.longest_in(self.budget.kv_bytes) if self.fits else 0


def make_plan(model: PlannedModel, options: Options) -> Plan:
    """Compute a plan. Raises StartError naming the option at fault; a model that does not fit is an answer."""
    shape, device = model.shape, options.device
    weights = weight_format(options.dtype) if options.dtype else model.stored
    kv_bytes = 2 if options.kv_cache_dtype == "auto" else kv_dtype_bytes(options.kv_cache_dtype)
    setup = Setup(shape, device, weights, kv_bytes, options.tp)
    roofline = Roofline(setup)
    calibration = fit(roofline, options.records) if options.records else default_calibration(roofline)
    contexts = options.contexts or (_default_context(options.load, shape.max_position),)
    context_len = contexts[0]
    buckets = _buckets(shape, options)
    budget = _memory(model, setup, options, buckets)
    pools = KvPools.of(shape, options.block_size, kv_bytes, expected_len=context_len, tp=options.tp)
    num_blocks = pools.blocks_at(pools.fit(max(budget.kv_bytes, 0)))
    maker = _Rows(roofline, calibration)
    held = {c: pools.sequences_in(budget.kv_bytes, c) for c in contexts}
    decodes = [maker.row(decode(b, c), b <= held[c]) for c in contexts for b in options.batches]
    lengths = sorted({*PREFILLS, min(options.max_num_batched_tokens, context_len)})
    longest = pools.longest_in(budget.kv_bytes)
    prefills = [maker.row(prefill(n), n <= longest) for n in lengths]
    service = found = cost = None
    changes: Sequence[Change] = ()
    if options.load is not None and min(num_blocks) >= 1:
        limits = Limits(pools, num_blocks, options.max_num_seqs, options.max_num_batched_tokens)
        service = Service(roofline, calibration, limits)
        found = capacity(service, options.load, options.slo, options.replicas)
        changes = sensitivity(service, options.load, options.slo)
        if options.price_per_hour is not None:
            cost = price(found, options.price_per_hour, options.tp)
    return Plan(
        model=model,
        options=options,
        setup=setup,
        context_len=context_len,
        buckets=buckets,
        budget=budget,
        pools=pools,
        num_blocks=num_blocks,
        calibration=calibration,
        decodes=tuple(decodes),
        prefills=tuple(prefills),
        capacity=found,
        changes=tuple(changes),
        price=cost,
        service=service,
        notes=tuple(_notes(setup, context_len, options)),
    )


def _default_context(load: Workload | None, max_position: int) -> int:
    return round(load.whole_len) if load else min(4096, max_position)


def _buckets(shape: ModelShape, options: Options) -> Buckets:
    """What the runner would capture."""
    if options.enforce_eager:
        return NOTHING
    return Buckets.of_model(shape, options.max_num_seqs, options.max_num_batched_tokens)


def _memory(model: PlannedModel, setup: Setup, options: Options, buckets: Buckets) -> MemoryBudget:
    weights_bytes = setup.shape.weight_bytes(setup.weights, options.tp)
    if options.dtype is None and options.tp == 1 and model.stored_bytes is not None:
        weights_bytes = model.stored_bytes
    tokens, rows = options.max_num_batched_tokens, min(options.max_num_seqs, options.max_num_batched_tokens)
    return MemoryBudget(
        total_bytes=options.device.memory_bytes,
        share=options.share,
        weights_bytes=weights_bytes,
        context_bytes=CONTEXT_BYTES,
        activation_bytes=activation_peak_bytes(setup.shape, tokens, rows, tp=options.tp),
        graphs_bytes=graphs_bytes(buckets.num_graphs),
        communication_bytes=COMMUNICATION_BYTES if options.tp > 1 else 0,
    )


def _notes(setup: Setup, context_len: int, options: Options) -> list[str]:
    shape, device = setup.shape, setup.device
    notes = list(device.doubts)
    if context_len > shape.max_position:
        notes.append(f"a context of {context_len:,} is beyond the model's own limit of {shape.max_position:,}")
    if setup.weights.body == "F8" and not device.fp8_flops:
        notes.append(f"{device.name} has no 8-bit arithmetic: fp8 weights save bytes there, not FLOPs")
    if options.tp > 1 and device.link_bandwidth is None:
        notes.append(f"the links of {device.name} are not known: communication between ranks is counted as free")
    if options.max_num_batched_tokens % 64:
        notes.append(
            f"max_num_batched_tokens {options.max_num_batched_tokens} is no multiple of 64: matrix kernels work in "
            "tiles, and one token over a tile has been measured to cost up to 32 % of a step"
        )
    if not shape.is_latent and options.tp > shape.num_kv_heads:
        notes.append(
            f"{shape.num_kv_heads} KV heads on {options.tp} ranks: each head is held by several, KV is not divided"
        )
    return notes


class _Rows:
    """Makes lines of the step tables."""

    def __init__(self, roofline: Roofline, calibration: Calibration) -> None:
        self.roofline, self.calibration = roofline, calibration

    def row(self, chunks: tuple[Chunk, ...], fits: bool) -> StepRow:
        (chunk,) = chunks
        estimate = self.calibration.estimate(self.roofline, chunks)
        return StepRow(
            batch=chunk.count,
            num_tokens=chunk.num_new * chunk.count,
            context_len=chunk.context_len,
            time=self.roofline.step(chunks),
            floor=self.roofline.floor(chunks),
            reach=self.roofline.reach(chunks) if self.roofline.measured else None,
            estimate=estimate,
            terms=self.calibration.terms(self.roofline, chunks),
            fits=fits,
            mbu=self.roofline.mbu(chunks, estimate.seconds),
            mfu=self.roofline.mfu(chunks, estimate.seconds),
        )
