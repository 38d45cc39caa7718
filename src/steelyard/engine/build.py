"""From a configuration to an engine that can step: checkpoint, runner, cache, scheduler, in that order."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from steelyard.cache.manager import CacheManager
from steelyard.checkpoint.entry import Checkpoint
from steelyard.checkpoint.find import open_checkpoint
from steelyard.config import EngineConfig
from steelyard.core.step import KvGroup, Runner, RunnerCaps
from steelyard.engine.baselines import batching_of, reserve_of, scheduler_options
from steelyard.engine.costs import EngineCost
from steelyard.engine.engine import Engine, EngineOptions
from steelyard.engine.ledgers import Ledgers
from steelyard.engine.measures import block_bytes, measure_on, plan_device
from steelyard.engine.ordering import order_of
from steelyard.engine.startup import say_memory, start_seconds
from steelyard.errors import StartError
from steelyard.plan.shape import ModelShape
from steelyard.runner.bounded import model_shape, sinks_of
from steelyard.runner.kv import available_bytes
from steelyard.runner.options import RunnerOptions, resolve_device
from steelyard.runner.start import start_runner
from steelyard.scheduler.protocols import Batching, Faults
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.scripted import Script, ScriptedRunner

GIB = 2**30
SCRIPT_NUM_BLOCKS = 4096
SCRIPT_MAX_ROWS = 256
SCRIPT_MAX_BATCHED_TOKENS = 8192

_log = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    *,
    checkpoint: Checkpoint | None = None,
    clock_ns: Callable[[], int] = time.monotonic_ns,
    faults: Faults | None = None,
    imported_s: float | None = None,
) -> Engine:
    """An engine on the configured model, or on `config.script`. `checkpoint`: the model, if it is open already.

    `imported_s`: what the process took until now, for the account of the start.
    Raises StartError (CheckpointError for the model's files) with what to do, the numbers in it if memory lacks.
    """
    began_ns = clock_ns()
    if checkpoint is None:
        checkpoint = open_checkpoint(config.model, "dummy" if config.script else config.load_format)
    runner, eos_token_ids = _runner_of(checkpoint, config, clock_ns)
    caps = runner.caps
    shape = model_shape(checkpoint.config, config.kv_window, config.kv_sinks)
    device = plan_device() if config.script is None and config.device != "cpu" else None
    measure = measure_on(device, shape, caps) if device is not None else None
    cache = CacheManager(caps, config.caches_prefixes, reserve_of(config, caps))
    options = scheduler_options(config, caps)
    ledgers = Ledgers(caps.max_rows, clock_ns(), measure)
    max_tokens = min(caps.max_batched_tokens, config.max_num_batched_tokens or caps.max_batched_tokens)
    order = order_of(config.scheduling_policy, ledgers, max_tokens)
    batching, cost = batching_of(config, caps), EngineCost(caps, block_bytes(shape, caps), ledgers.book, measure)
    scheduler = Scheduler(caps, cache, options, order=order, batching=batching, cost=cost, faults=faults)
    engine = Engine(
        runner,
        cache,
        scheduler,
        EngineOptions(
            model=checkpoint.name,
            eos_token_ids=eos_token_ids,
            seed=config.seed,
            check_invariants=config.check_invariants,
            block_bytes=block_bytes(shape, caps),
            start_seconds=start_seconds(runner, imported_s, (clock_ns() - began_ns) / 1e9),
            config=_effective(config, runner, scheduler, batching),
        ),
        clock_ns=clock_ns,
        ledgers=ledgers,
    )
    _say(engine, (clock_ns() - began_ns) / 1e9)
    return engine


def _runner_of(
    checkpoint: Checkpoint, config: EngineConfig, clock_ns: Callable[[], int]
) -> tuple[Runner, frozenset[int]]:
    """The model's runner or the script's, and the ids that end a text."""
    if config.script is None:
        return _start_runner(checkpoint, config), checkpoint.eos_token_ids
    script = Script.load(Path(config.script))
    runner = ScriptedRunner(_script_caps(config, checkpoint), script, clock=clock_ns)
    return runner, checkpoint.eos_token_ids | {script.eos_token_id}


def runner_options(config: EngineConfig) -> RunnerOptions:
    """What of the configuration is the runner's."""
    return RunnerOptions(
        dtype=config.dtype,
        load_format=config.load_format,
        device=config.device,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        swap_space_bytes=int(config.swap_space * GIB),
        enforce_eager=config.enforce_eager,
        overlap=False if config.num_speculative_tokens and config.async_scheduling is None else config.async_scheduling,
        seed=config.seed,
        backend="invariant" if config.deterministic else "auto",
        attention_backend=config.attention_backend,
        whole_prompts=config.whole_prompts,
        kv_allocation=config.kv_allocation,
        kernel_cache=config.kernel_cache,
        serves=True,
        kv_cache_dtype=config.kv_cache_dtype,
        kv_window=config.kv_window,
        kv_sinks=config.kv_sinks,
    )


def _start_runner(checkpoint: Checkpoint, config: EngineConfig) -> Runner:
    options = runner_options(config)
    try:
        return start_runner(checkpoint, options)
    except (MemoryError, RuntimeError) as error:
        # torch says that an allocation failed with a RuntimeError, on a GPU with a subclass of it.
        if isinstance(error, MemoryError) or "memory" in str(error).lower():
            raise StartError(f"not enough memory for {checkpoint.name}: {_what_failed(error, options)}") from error
        raise


_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (\w+)", re.IGNORECASE)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def _what_failed(error: BaseException, options: RunnerOptions) -> str:
    asked = _ASKED.search(str(error))
    what = "an allocation failed"
    if asked is not None:
        amount, unit = asked.groups()
        what = f"an allocation of {float(amount) * _UNITS.get(unit, GIB) / GIB:,.2f} GiB failed"
    free_bytes = available_bytes(resolve_device(options.device))
    return (
        f"{what}, {free_bytes / GIB:,.2f} GiB are free. Lower --num-gpu-blocks-override, --kv-cache-memory-bytes, "
        "--max-num-seqs or --max-num-batched-tokens, or take a smaller model or --dtype"
    )


def _script_caps(config: EngineConfig, checkpoint: Checkpoint) -> RunnerCaps:
    """Sizes for a script: the model's vocabulary and context, and a pool that costs nothing."""
    shape = ModelShape.from_config(dict(checkpoint.config))
    block_size = config.block_size or 16
    return RunnerCaps(
        block_size=block_size,
        num_blocks=(config.num_gpu_blocks_override or SCRIPT_NUM_BLOCKS,),
        groups=(KvGroup(1),),
        max_rows=config.max_num_seqs or SCRIPT_MAX_ROWS,
        max_model_len=config.max_model_len or shape.max_position,
        max_batched_tokens=config.max_num_batched_tokens or SCRIPT_MAX_BATCHED_TOKENS,
        vocab_size=shape.vocab_size,
        overlaps=bool(config.async_scheduling),
        fingerprint=checkpoint.fingerprint,
        kv_layout=f"script/{block_size}",
    )


def _effective(config: EngineConfig, runner: Runner, scheduler: Scheduler, batching: Batching) -> dict[str, object]:
    """The configuration with what was decided in place of None."""
    caps = runner.caps
    return asdict(config) | {
        "dtype": caps.kv_layout.split("/")[0],
        "block_size": caps.block_size,
        "num_blocks": list(caps.num_blocks),
        "max_model_len": caps.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": caps.overlaps,
        "enable_prefix_caching": config.caches_prefixes,
        "batch_size": getattr(batching, "batch_size", None),
        "attention_backend": getattr(runner, "attention", "none"),
        "kv_sinks": None if config.kv_window is None else sinks_of(config.kv_sinks),
    }


def _say(engine: Engine, took_s: float) -> None:
    caps, scheduler, memory = engine.runner.caps, engine.scheduler, engine.runner.memory()
    _log.info(
        "%s: %.1f s to load, %.2f GiB weights, %.2f GiB KV cache (%s blocks of %d tokens, %s), context %d, "
        "%d requests and %d tokens a step, prefix caching %s, overlap %s",
        *(engine.options.model, took_s, memory.weights_bytes / GIB, memory.kv_pool_bytes / GIB),
        *("+".join(map(str, caps.num_blocks)), caps.block_size, caps.kv_layout, caps.max_model_len),
        *(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        *("on" if engine.cache.enable_prefix_caching else "off", "on" if caps.overlaps else "off"),
    )
    if caps.num_host_blocks:
        blocks, rate = "+".join(map(str, caps.num_host_blocks)), caps.host_bandwidth / 1e9
        _log.info("host tier: %s blocks, copied at %.1f GB/s one way", blocks, rate)
    say_memory(memory, engine.options.start_seconds)
    bound = scheduler.bound
    if bound.tokens < caps.max_model_len:
        _log.warning(
            "%s, less than the context of %d: longer requests will be refused (a larger %s allows more)",
            *(bound.why, caps.max_model_len, bound.option),
        )
