"""Start a runner: device, dtype, decoder, weights, KV pool, in that order; and the account of its memory."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

import torch

from steelyard.checkpoint.entry import Checkpoint
from steelyard.core.step import MemoryTerms, Runner
from steelyard.kernels.backend import Backend
from steelyard.kernels.cpu import CpuBackend
from steelyard.kernels.invariant import InvariantBackend
from steelyard.kernels.kv_fp8 import FP8
from steelyard.kernels.reference import ReferenceBackend
from steelyard.kernels.select import choose_attention
from steelyard.layers.linear import Place
from steelyard.models.decoder import Decoder
from steelyard.models.load import dummy_weights, load_weights
from steelyard.plan.defaults import BY_DEVICE
from steelyard.plan.memory import MemoryBudget, activation_peak_bytes
from steelyard.runner.bounded import bounded_config, model_shape
from steelyard.runner.caps import caps_of
from steelyard.runner.kv import KvPool, available_bytes, size_pool
from steelyard.runner.kv_scales import kv_scales
from steelyard.runner.options import (
    RunnerOptions,
    check_invariant,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_limits,
    say_unused,
)
from steelyard.runner.phases import Phases, resident_bytes
from steelyard.runner.runner import TorchRunner

_log = logging.getLogger(__name__)


def start_runner(checkpoint: Checkpoint, options: RunnerOptions) -> Runner:
    """A runner that can launch steps. Raises StartError (CheckpointError for the model's files) saying what to do."""
    device = resolve_device(options.device)
    if options.backend == "invariant":
        check_invariant(device)
    if device.type == "cuda":
        # Found by name: it needs Triton, which a machine without a GPU need not have.
        start: Callable[..., Runner] = importlib.import_module("steelyard.runner.start_device").start_device_runner
        return start(checkpoint, options)
    return start_torch_runner(checkpoint, options)


def start_torch_runner(checkpoint: Checkpoint, options: RunnerOptions) -> TorchRunner:
    """A runner for a CPU: shapes are exact, and launching is computing."""
    say_unused(options)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device, {entry.kind for entry in checkpoint.tensors.values()})
    shape = model_shape(checkpoint.config, options.kv_window, options.kv_sinks)
    limits = resolve_limits(options, device, shape.max_position)
    config = bounded_config(checkpoint.config, options.kv_window, options.kv_sinks)
    backend = _backend(options, config.layers[0].head_dim, limits.block_size, device)
    kv_dtype = resolve_kv_dtype(options, backend.kv_dtype(dtype), None, backend.attention.name)
    phases = Phases(device)
    total_bytes, context_bytes = available_bytes(device), resident_bytes()
    decoder = Decoder(config, Place(dtype, device, backend), limits.max_model_len)
    with phases("weights"):
        if options.load_format == "dummy":
            dummy_weights(decoder, options.seed)
        else:
            load_weights(decoder, checkpoint, lambda: phases("pack"))
    peak_bytes = activation_peak_bytes(shape, limits.max_batched_tokens, limits.max_rows, max(dtype.itemsize, 4))
    budget = MemoryBudget(
        total_bytes=total_bytes,
        share=options.gpu_memory_utilization or BY_DEVICE[device.type].gpu_memory_utilization,
        weights_bytes=decoder.weights_bytes,
        activation_bytes=peak_bytes,
    )
    scales = kv_scales(decoder, checkpoint, limits, limits.max_batched_tokens) if kv_dtype == FP8 else None
    with phases("KV pool"):
        num_blocks = size_pool(shape, options, limits, budget, kv_dtype.itemsize)
        empty = torch.empty(0, dtype=kv_dtype, device=device)
        kv = KvPool(config, num_blocks, limits.block_size, empty, scales)
        kv.add_host(options.swap_space_bytes)
    caps = caps_of(checkpoint, shape, decoder, kv, limits)
    runner = TorchRunner(decoder, kv, caps, limits, checkpoint.eos_token_ids)
    terms = _terms(budget, kv.nbytes, context_bytes)
    runner.memory_terms = lambda: terms
    runner.start_seconds = dict(phases.seconds)
    return runner


def _backend(options: RunnerOptions, head_dim: int, block_size: int, device: torch.device) -> Backend:
    """Operators with the attention asked for; `reference` stands for all of them. Raises StartError."""
    choice = choose_attention(options.attention_backend, head_dim, block_size, device)
    if "reference" in (options.backend, choice.name):
        return ReferenceBackend()
    if options.backend == "invariant":
        return InvariantBackend()
    _log.info("attention: %s (%s)", choice.name, choice.reason)
    return CpuBackend(choice.name)


def _terms(budget: MemoryBudget, kv_bytes: int, context_bytes: int | None) -> MemoryTerms:
    """The process's memory once it can step; `context_bytes`: what it held before its first weight.

    What it has grown by is measured, weights are counted, and what the two differ by is in no term. Pool and
    activations are reserved: their pages are taken when they are first touched. Where nothing tells what a process
    holds, growth is taken for the weights'.
    """
    now_bytes = resident_bytes()
    grown_bytes = budget.weights_bytes
    if context_bytes is not None and now_bytes is not None:
        grown_bytes = now_bytes - context_bytes
    return MemoryTerms(
        total_bytes=budget.total_bytes + (context_bytes or 0),
        context_bytes=context_bytes or 0,
        weights_bytes=budget.weights_bytes,
        kv_pool_bytes=kv_bytes,
        activation_peak_bytes=budget.activation_bytes,
        free_bytes=budget.total_bytes - grown_bytes - kv_bytes - budget.activation_bytes,
    )
