"""Start a DeviceRunner: weights, fixed tensors, the largest step measured, the KV pool, graphs; each phase timed.

    total = context + weights + fixed tensors and scratch + activation peak + graphs + KV pool + what is left

The pool gets what the measured terms leave of the share; graphs are estimated before and measured after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from steelyard.checkpoint.entry import Checkpoint
from steelyard.core.step import MemoryTerms
from steelyard.kernels.ahead import compile_ahead, count_kernels, keep_kernels, launching_nothing
from steelyard.kernels.backend import Backend
from steelyard.kernels.gpu import Gpu, gpu_of
from steelyard.kernels.kv_fp8 import FP8
from steelyard.kernels.reference import ReferenceBackend
from steelyard.kernels.sampling import Controls
from steelyard.kernels.select import ATTENTION, choose_attention, make_attention
from steelyard.kernels.step import FrameLayout, StepOperators, TorchStep
from steelyard.kernels.triton_attention import TritonAttention
from steelyard.kernels.triton_backend import TritonBackend
from steelyard.kernels.triton_configs import AttentionShape
from steelyard.kernels.triton_step import TritonStep
from steelyard.layers.linear import Place
from steelyard.models.config import DecoderConfig, LayerConfig
from steelyard.models.decoder import Decoder
from steelyard.models.load import dummy_weights, load_weights
from steelyard.plan.captures import NOTHING, Buckets
from steelyard.plan.defaults import ON_GPU
from steelyard.plan.memory import MemoryBudget, graphs_bytes
from steelyard.runner.bounded import bounded_config, model_shape
from steelyard.runner.caps import caps_of
from steelyard.runner.device import MAX_LOGIT_ROWS, DeviceStep, Shape
from steelyard.runner.device_runner import DeviceRunner
from steelyard.runner.graphs import FEW_TOKENS, Captures, Graph
from steelyard.runner.kv import KvPool, size_pool
from steelyard.runner.kv_scales import Scales, calibrated, kv_scales, stored_scales
from steelyard.runner.launched import Machine
from steelyard.runner.options import RunnerOptions, resolve_device, resolve_dtype, resolve_kv_dtype, resolve_limits
from steelyard.runner.phases import Phases
from steelyard.runner.rows import Rows

GIB = 2**30
_log = logging.getLogger(__name__)


class DeviceStart:
    """The parts of a runner while it is being put together.

    `elsewhere`: a GPU to compile for and not to run on. Tensors are then meta, no weight is read, and of layers that
    are alike two are kept.
    """

    def __init__(self, checkpoint: Checkpoint, options: RunnerOptions, elsewhere: Gpu | None = None) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.device = device = torch.device("meta") if elsewhere else resolve_device(options.device)
        self.gpu = elsewhere or gpu_of(device)
        self.serving = torch.device("cuda") if self.gpu else device
        self.phases = Phases(device)
        self.dtype = resolve_dtype(options.dtype, self.serving, {e.kind for e in checkpoint.tensors.values()})
        self.shape = model_shape(checkpoint.config, options.kv_window, options.kv_sinks)
        self.limits = resolve_limits(options, self.serving, self.shape.max_position)
        self.max_tokens = max(self.limits.max_batched_tokens, self.limits.max_rows)
        self.config = bounded_config(checkpoint.config, options.kv_window, options.kv_sinks)
        if elsewhere:
            self.config = replace(self.config, layers=_kinds(self.config.layers))
        self.free_at_start = self.phases.free_bytes()
        self.backend, self.renew = make_backend(self.config, self)
        attention = self.backend.attention.name
        self.kv_dtype = resolve_kv_dtype(options, self.backend.kv_dtype(self.dtype), self.gpu, attention)
        self.scales: Scales | None = None
        with self.phases("weights"):
            self.decoder = Decoder(self.config, Place(self.dtype, device, self.backend), self.limits.max_model_len)
            if elsewhere:
                pass  # only their shapes matter
            elif options.load_format == "dummy":
                dummy_weights(self.decoder, options.seed)
            else:
                load_weights(self.decoder, checkpoint, lambda: self.phases("pack"))
        self.rows = Rows(self.limits, len(self.shape.kv_groups()), device)
        frame = FrameLayout(self.limits.max_rows, max(2 * self.max_tokens, 8192))
        self.step = DeviceStep(self.decoder, self.rows, self._operators(frame), self.max_tokens)

    def _operators(self, frame: FrameLayout) -> StepOperators:
        if self.backend.name == "triton":
            return TritonStep(frame, self.rows.layout, min(frame.max_rows, MAX_LOGIT_ROWS), self.device)
        return TorchStep(frame, self.rows.layout)

    def pool(self, num_blocks: tuple[int, ...]) -> KvPool:
        """A zeroed pool, and an attention that has seen no other."""
        like = torch.empty(0, dtype=self.kv_dtype, device=self.device)
        self.step.kv = None
        self.renew(self.kv_dtype == FP8)
        self.step.kv = pool = KvPool(self.config, num_blocks, self.limits.block_size, like, self.scales)
        return pool

    def find_scales(self) -> None:
        """Of an fp8 pool, before there is one."""
        if self.kv_dtype == FP8:
            self.renew(False)
            self.scales = kv_scales(self.decoder, self.checkpoint, self.limits, self.max_tokens)

    def compile(self) -> None:
        """Have every kernel of a step compiled, each once and several at a time: most of a cold start.

        If that fails, the first steps compile what they launch, one kernel after another: slower, and it is said.
        """
        if self.gpu is None or not isinstance(self.backend.attention, TritonAttention):
            return
        try:
            with launching_nothing(self.gpu, is_here=True):
                twin = DeviceStart(self.checkpoint, self.options, self.gpu)
                compile_ahead(twin.launch_all, self.gpu.arch)
        except Exception:  # whatever a model or a version of Triton has that a step without a GPU does not
            _log.warning("kernels could not be compiled before the first steps; those compile them", exc_info=True)

    def launch_all(self) -> None:
        """Every launch of a start, in its order, for where launching only compiles."""
        if self.kv_dtype == FP8:
            self.renew(False)
            own = stored_scales(self.decoder, self.checkpoint)
            self.scales = own or calibrated(self.decoder, self.limits, self.max_tokens)[0]
        self.every_kernel()

    def every_kernel(self) -> None:
        """Run every kernel of a step once, in every form, over a pool of one block. The steps are padding only."""
        self.pool((1,) * len(self.shape.kv_groups()))
        if self.gpu is None:
            return
        rows, tokens, step = self.limits.max_rows, self.max_tokens, self.step
        few = (1, 2)  # tokens: products of one have a form, those of a few another
        shapes = [Shape.of_bucket("mixed", min(n, tokens), rows) for n in (tokens, FEW_TOKENS // 2, *few)]
        shapes += [Shape.of_bucket("decode", min(n, rows), rows) for n in (*few, 16, 32, 64, 128, 256)]
        for shape in dict.fromkeys(shapes):
            step.forward(shape)
        for cut in (True, False):
            for size in {min(n, rows) for n in (*few, 16)}:
                step.head(size, cut)
            self.choose(cut)

    @torch.inference_mode()
    def choose(self, cut: bool) -> None:
        """A row of float32 logits as those are sampled that the head leaves out: guesses, penalties, masks."""
        logits = torch.zeros(1, self.shape.vocab_size, device=self.device)
        u = torch.zeros(1, dtype=torch.float64, device=self.device)
        one, whole = (torch.ones(1, dtype=dtype, device=self.device) for dtype in (torch.float32, torch.int32))
        self.backend.choose(logits, u, Controls(one, *((one, whole, one) if cut else (None, None, None))))

    def activation_peak_bytes(self) -> int:
        """What the largest step takes for a moment, measured: padding only, but every tensor at its full size."""
        if self.device.type != "cuda":
            return 0
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.largest_step()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def largest_step(self) -> None:
        """All tokens and all rows, padding only."""
        self.step.forward(Shape(self.max_tokens, self.limits.max_rows, 1 if self.limits.max_rows > 1 else 0))
        self.step.head(self.limits.max_rows, True)

    def budget(self, num_graphs: int) -> MemoryBudget:
        """Every term but the pool."""
        activations = self.activation_peak_bytes()
        self.pool_free = self.phases.free_bytes()
        self.slack_bytes = _slack_bytes(self.device)
        total = torch.cuda.mem_get_info(self.device)[1] if self.device.type == "cuda" else 0
        share = self.options.gpu_memory_utilization or ON_GPU.gpu_memory_utilization
        weights = self.decoder.weights_bytes
        fixed = max(self.free_at_start - self.pool_free - weights, self.step.nbytes)
        return MemoryBudget(
            total_bytes=total,
            share=share,
            weights_bytes=weights,
            context_bytes=total - self.free_at_start + fixed,
            activation_bytes=activations,
            graphs_bytes=graphs_bytes(num_graphs),
        )

    def buckets(self) -> Buckets:
        """Sizes to capture; none where graphs are off, or where the attention reads sizes on the host."""
        entry = ATTENTION.get(self.backend.attention.name)
        if self.options.enforce_eager or (entry is not None and not entry.captured and self.gpu is not None):
            return NOTHING
        return Buckets.of_model(self.shape, self.limits.max_rows, self.limits.max_batched_tokens)

    def capture(self, buckets: Buckets) -> dict[tuple[str, int], Graph]:
        """Largest first, all in one pool of memory."""
        captures, graphs = Captures(self.device), dict[tuple[str, int], Graph]()
        for kind, sizes in (("mixed", buckets.mixed), ("decode", buckets.decode)):
            for size in reversed(sizes):
                shape = Shape.of_bucket(kind, size, self.limits.max_rows)
                warm = kind == "decode" or size <= FEW_TOKENS or size == sizes[-1]
                graphs[kind, size] = captures.capture(_call(self.step.forward, shape), warm)
        for kind, cut in (("head", False), ("cut", True)):
            for size in reversed(buckets.decode):
                graphs[kind, size] = captures.capture(_call(self.step.head, size, cut))
        return graphs


def start_device_runner(checkpoint: Checkpoint, options: RunnerOptions) -> DeviceRunner:
    """A runner with fixed buffers and graphs. Raises StartError (CheckpointError for the model's files)."""
    keep_kernels(options.kernel_cache)
    kernels = count_kernels()
    start = DeviceStart(checkpoint, options)
    limits, phases, buckets = start.limits, start.phases, start.buckets()
    with phases("kernels"):
        start.compile()
    with phases("KV scales"):
        start.find_scales()
    with phases("first steps"):
        start.every_kernel()
    with phases("largest step"):
        budget = start.budget(buckets.num_graphs)
    with phases("KV pool"):
        num_blocks = size_pool(start.shape, options, limits, budget, start.kv_dtype.itemsize)
        kv = start.pool(num_blocks)
    if options.swap_space_bytes:
        with phases("host tier"):
            kv.add_host(options.swap_space_bytes)
    before = phases.free_bytes()
    with phases("graphs"):
        graphs = start.capture(buckets)
    left_bytes = phases.free_bytes()
    captured_bytes = before - left_bytes
    caps = caps_of(checkpoint, start.shape, start.decoder, kv, limits)
    machine = Machine(start.decoder, kv, start.rows, start.step, buckets, graphs)
    runner = DeviceRunner(machine, caps, checkpoint.eos_token_ids)
    terms = _terms(budget, kv.nbytes, captured_bytes, left_bytes, start.slack_bytes)
    runner.memory_terms = lambda: terms
    runner.start_seconds = dict(phases.seconds)
    runner.kernels = kernels.counts
    kernels.is_serving = options.serves
    _log.info("kernels: %s", kernels)
    _log.info(
        "%s attention (prompts: %s); %d graphs (%.2f GiB), steps of up to %d tokens in one; start: %s",
        *(start.backend.attention.name, getattr(start.backend.attention, "prefill_kernel", "the same"), len(graphs)),
        *(captured_bytes / GIB, max(buckets.mixed, default=0)),
        phases.table(),
    )
    return runner


def make_backend(config: DecoderConfig, start: DeviceStart) -> tuple[Backend, Callable[[bool], None]]:
    """The backend for this device, and a function that makes its attention anew, for an fp8 pool or another.

    Raises StartError where heads or blocks are not among those the kernels have.
    """
    limits, device, gpu, options = start.limits, start.device, start.gpu, start.options
    if options.backend == "reference":
        plain = ReferenceBackend()
        return plain, lambda is_fp8: None
    first = config.layers[0]
    chosen = "triton"  # without a GPU: Triton's interpreter, in tests
    if gpu is not None:
        choice = choose_attention(options.attention_backend, first.head_dim, limits.block_size, start.serving, gpu)
        chosen = choice.name
        if device == start.serving:
            _log.info("attention: %s (%s)", choice.name, choice.reason)
    sampled = max(limits.max_rows, MAX_LOGIT_ROWS)  # guesses make several rows of logits of one
    if chosen != "triton":
        plain_attention = make_attention(chosen)
        return TritonBackend(plain_attention, sampled, device, max_tokens=start.max_tokens), lambda is_fp8: None
    shape = AttentionShape(
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        block_size=limits.block_size,
        max_rows=limits.max_rows,
        max_tokens=start.max_tokens,
        windows=config.windows,
        keep_first=first.keep_first,
        dtype=start.dtype,
    )
    pdl = gpu is not None and gpu.capability[0] >= 9

    def attention(is_fp8: bool) -> TritonAttention:
        return TritonAttention(replace(shape, is_fp8=is_fp8), device, pdl=pdl, gpu=gpu)

    backend = TritonBackend(attention(False), sampled, device, max_tokens=start.max_tokens, pdl=pdl)

    def renew(is_fp8: bool) -> None:
        backend.attention = attention(is_fp8)

    return backend, renew


def _call(function: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: function(*arguments)


def _kinds(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Of each kind of layer its first two."""
    return tuple(layer for at, layer in enumerate(layers) if layers[:at].count(layer) < 2)


def _slack_bytes(device: torch.device) -> int:
    """What the allocator holds and nobody uses."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _terms(budget: MemoryBudget, kv_bytes: int, captured_bytes: int, left_bytes: int, slack_bytes: int) -> MemoryTerms:
    """The device's memory once it can step. `left_bytes` are measured then, not computed: what is in no term shows.

    The activations' peak is reserved within them. Without a GPU, in tests, there is no device to have a total.
    """
    measured = budget.total_bytes > 0
    terms = MemoryTerms(
        total_bytes=budget.total_bytes,
        context_bytes=budget.context_bytes - slack_bytes,
        weights_bytes=budget.weights_bytes,
        kv_pool_bytes=kv_bytes,
        activation_peak_bytes=budget.activation_bytes,
        graphs_bytes=captured_bytes,
        allocator_slack_bytes=slack_bytes,
        free_bytes=left_bytes - budget.activation_bytes if measured else 0,
    )
    taken = budget.context_bytes + budget.weights_bytes + budget.activation_bytes + kv_bytes + captured_bytes
    return terms if measured else replace(terms, total_bytes=taken)
