"""What an operator may choose, as frozen values. None means "decide for me". Validation and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.errors import StartError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEVICES = ("auto", "cpu", "cuda")
TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("auto", "none", "deepseek_r1", "qwen3")
MAX_API_SERVERS = 64
LOG_FORMATS = ("text", "json")
SCHEDULING_POLICIES = ("fcfs", "priority", "fair", "slo")
KV_CACHE_DTYPES = ("auto", "fp8")
BATCHINGS = ("static", "dynamic", "continuous")
KV_CACHES = ("on", "off")
KV_ALLOCATIONS = ("paged", "contiguous", "contiguous-max")
ATTENTION_BACKENDS = ("auto", "triton", "cpu", "sdpa", "naive", "flashinfer", "reference")
MAX_BATCH_TIMEOUT_S = 10.0
MAX_SLO_MS = 1e9


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process needs to start. Flags of `steelyard serve` map to fields one to one.

    max_num_batched_tokens  the token budget of a step
    num_gpu_blocks_override pool size in blocks, on the CPU too; else kv_cache_memory_bytes, else a share
    swap_space              GiB of host memory for KV of preempted requests and of evicted prefixes; 0: none
    gpu_memory_utilization  share of the device's memory (on a CPU: of available memory) for everything
    script                  a JSON file of token ids to answer with in place of a model: the server by itself
    num_speculative_tokens  guesses a step may check for a row, looked up in the row's own text; 0: none
    speculative_load        tokens that a step of decodes takes at no cost: guesses fill it up to there
    kernel_cache            folder of compiled kernels, used and filled; None: Triton's own. On a CPU there are none
    async_scheduling        launch step N + 1 before step N is collected; None: where the device runs by itself

    Baselines to compare with; all give the same tokens:
    batching                static, dynamic: a batch of `batch_size` runs until its last member ends; `batch_timeout`
                            seconds are waited for it to fill
    enable_chunked_prefill  off: a prompt is computed in one step or waits
    kv_cache                off: every step computes its sequences from their first token again
    kv_allocation           contiguous: prompt and max_tokens reserved in one run of blocks; -max: the whole context
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
    swap_space: float = 0.0
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    batching: str = "continuous"
    batch_size: int | None = None
    batch_timeout: float | None = None
    enable_chunked_prefill: bool = True
    kv_cache: str = "on"
    kv_allocation: str = "paged"
    attention_backend: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_window: int | None = None
    kv_sinks: int | None = None
    scheduling_policy: str = "fcfs"
    deterministic: bool = False
    num_speculative_tokens: int = 0
    speculative_load: int = 4
    kernel_cache: str | None = None
    seed: int = 0
    skip_tokenizer_init: bool = False
    check_invariants: bool = False
    script: str | None = None

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--load-format", self.load_format, LOAD_FORMATS)
        _one_of("--device", self.device, DEVICES)
        _one_of("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.kernel_cache == "":
            raise StartError("--kernel-cache must name a folder: it is empty", param="kernel_cache")
        _at_least("kv_window", self.kv_window, 1)
        _at_least("kv_sinks", self.kv_sinks, 0)
        if self.kv_sinks is not None and self.kv_window is None:
            raise StartError("--kv-sinks belongs to --kv-window: give both or neither")
        _one_of("--scheduling-policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        _at_least("speculative_load", self.speculative_load, 1)
        for flag in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"):
            _at_least(flag, getattr(self, flag), 1)
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        self._check_baselines()
        self._check_deterministic()
        self._check_swap_space()
        if self.block_size is not None and (self.block_size < 1 or self.block_size & (self.block_size - 1)):
            raise StartError(f"--block-size must be a power of two, got {self.block_size}")
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise StartError(f"--gpu-memory-utilization must be in (0, 1], got {share}")

    def _check_deterministic(self) -> None:
        obstacles = {
            "device": (self.device == "cuda", "runs on a CPU; add --device cpu"),
            "attention_backend": (self.attention_backend != "auto", "has its own attention; drop --attention-backend"),
            "kv_cache_dtype": (self.kv_cache_dtype != "auto", "reads no fp8 pool; drop --kv-cache-dtype"),
            "kv_window": (self.kv_window is not None, "has no bounded KV; drop --kv-window"),
        }
        for param, (stands, why) in obstacles.items():
            if self.deterministic and stands:
                raise StartError(f"--deterministic {why}", param=param)

    def _check_swap_space(self) -> None:
        if not 0.0 <= self.swap_space < float("inf"):
            raise StartError(f"--swap-space must be at least 0 GiB, got {self.swap_space:g}", param="swap_space")
        if self.swap_space and (self.kv_cache == "off" or self.kv_allocation != "paged"):
            raise StartError(
                "--swap-space moves KV in blocks: it needs --kv-cache on and --kv-allocation paged", param="swap_space"
            )

    def _check_baselines(self) -> None:
        _one_of("--batching", self.batching, BATCHINGS)
        _one_of("--kv-cache", self.kv_cache, KV_CACHES)
        _one_of("--kv-allocation", self.kv_allocation, KV_ALLOCATIONS)
        _one_of("--attention-backend", self.attention_backend, ATTENTION_BACKENDS)
        _at_least("batch_size", self.batch_size, 1)
        if self.batching == "continuous" and (self.batch_size, self.batch_timeout) != (None, None):
            raise StartError(
                "--batch-size and --batch-timeout belong to --batching static or dynamic; continuous batching "
                "is limited by --max-num-seqs"
            )
        if self.num_speculative_tokens and (self.async_scheduling or self.kv_cache == "off" or self.script is not None):
            raise StartError(
                "--num-speculative-tokens: guesses are checked by a model (no --script), with a KV cache and without "
                "--async-scheduling; change that or leave it out",
                param="num_speculative_tokens",
            )
        if self.batch_timeout is not None and not 0.0 <= self.batch_timeout <= MAX_BATCH_TIMEOUT_S:
            raise StartError(f"--batch-timeout must be 0 to {MAX_BATCH_TIMEOUT_S:g} s, got {self.batch_timeout:g}")

    @property
    def caches_prefixes(self) -> bool:
        """Whether finished requests' KV may be used again: it is kept, and in blocks that can be shared."""
        return self.enable_prefix_caching and self.kv_cache == "on" and self.kv_allocation == "paged"

    @property
    def whole_prompts(self) -> bool:
        """Whether a step must be able to hold a request of the full context."""
        return self.kv_cache == "off" or not self.enable_chunked_prefill


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything the HTTP process needs to start.

    max_header_...         of a request's line and headers together
    header_timeout_s       from the connection, or the first byte of a later request, to the end of its headers
    slow_client_timeout_s  how long a reader may take nothing of its stream before it is dropped
    max_input_tokens ...   limits of one request, prompt, output, and both; None: what context and KV pool allow
    ttft_slo_ms, tpot_slo_ms  targets of requests that bring none and whose tenants have none, for slo scheduling
    tenants, api_key_file  who may ask; without either, anybody may do everything
    public_metrics         /metrics needs no key
    public_prefix          files of texts whose cached KV all tenants share
    api_server_count       HTTP processes that share the address and the engine
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    uds: str | None = None
    root_path: str = ""
    max_body_bytes: int = 8 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_header_count: int = 128
    header_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    slow_client_timeout_s: float = 60.0
    stall_limit_s: float = 20.0
    step_limit_s: float = 300.0
    shutdown_timeout_s: float = 30.0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    ignore_unknown_fields: bool = False
    tenants: str | None = None
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    public_metrics: bool = False
    allowed_origins: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    api_server_count: int = 1
    public_prefix: tuple[str, ...] = ()
    log_format: str = "text"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_prompt_tokens_details: bool = True
    ledger_log: str | None = None
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise StartError(f"--port must be between 0 and 65535, got {self.port}")
        _at_least("max_body_bytes", self.max_body_bytes, 1024)
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise StartError(f"--api-server-count must be 1 to {MAX_API_SERVERS}, got {self.api_server_count}")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "max_input_tokens", "max_output_tokens"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_total_tokens", self.max_total_tokens, 2)
        _at_least("max_header_bytes", self.max_header_bytes, 1024)
        _at_least("max_header_count", self.max_header_count, 8)
        for name in ("header_timeout_s", "body_timeout_s", "slow_client_timeout_s", "stall_limit_s", "step_limit_s"):
            if not getattr(self, name) > 0:
                raise StartError(f"--{name.removesuffix('_s').replace('_', '-')} must be above 0 s")
        for name in ("ttft_slo_ms", "tpot_slo_ms"):
            if not (getattr(self, name) is None or 0 < getattr(self, name) <= MAX_SLO_MS):
                raise StartError(f"--{name.replace('_', '-')} must be above 0 and at most {MAX_SLO_MS:g} ms")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise StartError("--ssl-keyfile and --ssl-certfile belong together: give both")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise StartError(f"--root-path must begin with / and not end with it, got {self.root_path!r}")
        _one_of("--log-format", self.log_format, LOG_FORMATS)
        _one_of("--tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        _one_of("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS)


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StartError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}")


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise StartError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
