"""What an operator may choose, as frozen values. None means "decide for me". Validation and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.errors import StartError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process needs to start. Flags of `steelyard serve` map to fields one to one.

    max_num_batched_tokens  the token budget of a step
    num_gpu_blocks_override pool size in blocks, on the CPU too; else kv_cache_memory_bytes, else a share
    gpu_memory_utilization  share of the device's memory (on a CPU: of available memory) for everything
    script                  a JSON file of token ids to answer with in place of a model: the server by itself
    async_scheduling        launch step N + 1 before step N is collected; None: where the device runs by itself
    """

    model: str = "smollm2"
    dtype: str = "auto"
    load_format: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    seed: int = 0
    skip_tokenizer_init: bool = False
    check_invariants: bool = False
    script: str | None = None

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--load-format", self.load_format, LOAD_FORMATS)
        _one_of("--device", self.device, DEVICES)
        for flag in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"):
            _at_least(flag, getattr(self, flag), 1)
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        if self.block_size is not None and (self.block_size < 1 or self.block_size & (self.block_size - 1)):
            raise StartError(f"--block-size must be a power of two, got {self.block_size}")
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise StartError(f"--gpu-memory-utilization must be in (0, 1], got {share}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything the HTTP process needs to start."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_body_bytes: int = 8 * 2**20
    stall_limit_s: float = 20.0
    shutdown_timeout_s: float = 30.0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    enable_prompt_tokens_details: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise StartError(f"--port must be between 0 and 65535, got {self.port}")
        _at_least("max_body_bytes", self.max_body_bytes, 1024)
        _at_least("max_num_queued_reqs", self.max_num_queued_reqs, 1)
        _at_least("max_num_queued_tokens", self.max_num_queued_tokens, 1)


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StartError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}")


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise StartError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
