"""Which rule of batching and which allocation a configuration names: the baselines behind the scheduler's walls."""

from __future__ import annotations

from steelyard.cache.contiguous import Reserve, whole_context, whole_request
from steelyard.config import EngineConfig
from steelyard.core.step import RunnerCaps
from steelyard.errors import StartError
from steelyard.scheduler.admission import KV_OPTIONS
from steelyard.scheduler.batching.continuous import Continuous
from steelyard.scheduler.batching.dynamic import WINDOW_NS, Dynamic
from steelyard.scheduler.batching.static import Static
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.protocols import Batching
from steelyard.scheduler.speculation import Speculation


def scheduler_options(config: EngineConfig, caps: RunnerCaps) -> SchedulerOptions:
    """The scheduler's part of a configuration, over a runner that it has been checked to suit."""
    assert caps.checks_drafts or not config.num_speculative_tokens, "guesses that nobody checks"
    return SchedulerOptions(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        overlap=caps.overlaps,
        chunked_prefill=config.enable_chunked_prefill,
        kv_cache=config.kv_cache == "on",
        speculation=Speculation(config.num_speculative_tokens, config.speculative_load),
    )


def batching_of(config: EngineConfig, caps: RunnerCaps) -> Batching:
    """--batching with --batch-size (all rows) and --batch-timeout (static: 0, dynamic: 50 ms)."""
    size = min(config.batch_size or config.max_num_seqs or caps.max_rows, caps.max_rows)
    match config.batching:
        case "static":
            return Static(size, round((config.batch_timeout or 0.0) * 1e9))
        case "dynamic":
            wait_ns = WINDOW_NS if config.batch_timeout is None else round(config.batch_timeout * 1e9)
            return Dynamic(size, wait_ns)
    return Continuous()


def reserve_of(config: EngineConfig, caps: RunnerCaps) -> Reserve | None:
    """--kv-allocation as a rule of reservation; None: paged.

    Raises StartError for what cannot be served so: a pool without room for one reservation, and windows, whose blocks
    are given back behind them, without a KV cache.
    """
    if config.kv_cache == "off" and any(group.window is not None for group in caps.groups):
        raise StartError(
            "--kv-cache off: this model has layers with an attention window, which give back blocks that every step "
            "would need again; leave the cache on",
            param="kv_cache",
        )
    if config.kv_allocation == "paged":
        return None
    if config.kv_allocation == "contiguous":
        return whole_request
    room = min(caps.num_blocks) * caps.block_size
    if room < caps.max_model_len:
        raise StartError(
            f"--kv-allocation contiguous-max reserves {caps.max_model_len} tokens a request and the KV pool holds "
            f"{room}; lower --max-model-len or give a larger {KV_OPTIONS}",
            param="kv_allocation",
        )
    return whole_context(caps.max_model_len)
