"""The metrics of one server: what is counted here, what the engine's `Status` says, and the page of both.

Names that begin with vllm: mean what they mean there; ours begin with steelyard:. Every vllm: line carries
model_name, as dashboards expect. The set of names is the same under every flag: nothing appears on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.core.timed import State
from steelyard.server.exposition import Counter, Histogram, Labels, counter_lines, gauge_line, gauge_lines, label_text
from steelyard.wire.messages import Finished, Ready, Status

NS = 1e9
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_COUNTS = (0, 1, 2, 3, 5, 10, 20, 50, 100)
_OUTCOMES = ("stop", "length", "abort", "deadline", "error")

ENGINE_COUNTERS: dict[str, tuple[str, str]] = {
    "preemptions": ("vllm:num_preemptions_total", "Times a running request gave up its blocks."),
    "prefix_queries_tokens": ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits_tokens": ("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    "prompt_tokens": ("vllm:prompt_tokens_total", "Prompt tokens of admitted requests."),
    "generation_tokens": ("vllm:generation_tokens_total", "Tokens sampled and kept."),
    "recomputed_tokens": ("steelyard:recomputed_tokens_total", "Positions computed again after a preemption."),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total", "Guesses checked by --num-speculative-tokens."),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total", "Guesses that were right."),
    "overshoot_tokens": ("steelyard:overshoot_tokens_total", "Tokens computed beyond a request's end."),
    "prefill_chunks": ("steelyard:prefill_chunks_total", "Pieces in which prompts were computed."),
    "swaps_out": ("steelyard:swaps_out_total", "Preemptions that kept their KV on the host."),
    "swaps_in": ("steelyard:swaps_in_total", "Swapped choices that came back."),
    "host_blocks_out": ("steelyard:host_blocks_out_total", "Blocks copied from the device to the host tier."),
    "host_blocks_in": ("steelyard:host_blocks_in_total", "Blocks copied from the host tier to the device."),
    "host_hits_tokens": ("steelyard:host_prefix_hits_total", "Of prefix hits, the tokens copied from the host tier."),
    "forks": ("steelyard:forks_total", "Choices that took over a sibling's prompt."),
    "steps": ("steelyard:steps_total", "Steps run."),
    "step_device_ns": ("steelyard:step_device_seconds_total", "Device time of steps."),
    "step_tokens": ("steelyard:step_tokens_total", "Positions that steps computed for requests."),
    "padded_tokens": ("steelyard:padded_tokens_total", "Positions computed beside them to fill a captured size."),
    "held_slots": ("steelyard:held_slots_total", "Slots a static batch kept for members that had ended, by step."),
    "kv_fragmented": ("steelyard:kv_fragmented_total", "Times blocks were free but none in one run, as was needed."),
}
"""Key in `Status.counters`: name and help. Those that end in _ns are shown in seconds."""

ENGINE_GAUGES: dict[str, tuple[str, str]] = {
    "kv_slack_tokens": ("steelyard:kv_slack_tokens", "Slots of active blocks that hold no KV."),
    "kv_blocks_peak": ("steelyard:kv_blocks_peak", "The most blocks that were active at once."),
    "kv_largest_run": ("steelyard:kv_largest_run_blocks", "The most blocks that one request could take now."),
}
"""Key in `Status.gauges`: name and help."""

_QUEUE = frozenset(state.value for state in State if state.value.startswith("wait_"))
_PREFILL = frozenset({State.PREFILL.value})
_DECODE = frozenset({State.DECODE.value})
_INFERENCE = frozenset(state.value for state in State if state.resident)


class Metrics:
    """Everything counted in the HTTP process. One event loop; no locks."""

    def __init__(self) -> None:
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token, one a request.", _SECONDS
        )
        self.itl = Histogram("vllm:inter_token_latency_seconds", "Between tokens of a choice.", _TOKEN_SECONDS)
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self.queue = Histogram("vllm:request_queue_time_seconds", "Waiting for a step, one a choice.", _SECONDS)
        self.inference = Histogram("vllm:request_inference_time_seconds", "Resident, one a choice.", _SECONDS)
        self.prefill = Histogram("vllm:request_prefill_time_seconds", "In prefill steps, one a choice.", _SECONDS)
        self.decode = Histogram("vllm:request_decode_time_seconds", "In decode steps, one a choice.", _SECONDS)
        self.prompt_tokens = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS)
        self.generation_tokens = Histogram("vllm:request_generation_tokens", "Generated tokens of a choice.", _TOKENS)
        self.preemptions = Histogram("vllm:request_num_preemptions", "Preemptions of a choice.", _COUNTS)
        self.params_n = Histogram("vllm:request_params_n", "n as asked for.", _COUNTS)
        self.params_max_tokens = Histogram("vllm:request_params_max_tokens", "max_tokens as admitted.", _TOKENS)
        self.success = Counter(
            "vllm:request_success_total", "Accepted requests by how they ended.", ("finished_reason",)
        )
        for outcome in _OUTCOMES:
            self.success.add(0, outcome)
        self.rejections = Counter("vllm:admission_rejections_total", "Requests refused, by error code.", ("code",))
        self.responses = Counter("steelyard:http_responses_total", "Responses begun.", ("endpoint", "status"))
        self.tenant_tokens = Counter(
            "steelyard:tenant_tokens_total", "Tokens of a tenant's requests.", ("tenant", "kind")
        )
        self.tenant_responses = Counter(
            "steelyard:tenant_responses_total", "Responses begun for a tenant.", ("tenant", "status")
        )
        self.lost_lines = Counter("steelyard:log_lines_lost_total", "Lines a full disk did not take.", ("log",))
        for log in ("server", "ledger"):
            self.lost_lines.add(0, log)
        self.request_ns = Counter(
            "steelyard:request_time_seconds_total", "Time of requests by account.", ("state", "tenant")
        )
        for state in State:
            if state not in (State.ENDED, State.IN_ENGINE):
                self.request_ns.add(0, state.value, "")

    def choice_ended(self, finished: Finished) -> None:
        """Observe what the engine says of one choice, however it ended."""
        usage, ledger = finished.usage, finished.ledger
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.generation_tokens.observe(usage.completion_tokens)
        self.preemptions.observe(usage.preemptions)
        self.queue.observe(_seconds(ledger, _QUEUE))
        self.inference.observe(_seconds(ledger, _INFERENCE))
        self.prefill.observe(_seconds(ledger, _PREFILL))
        self.decode.observe(_seconds(ledger, _DECODE))

    def request_ended(self, outcome: str) -> None:
        self.success.add(1, outcome if outcome in _OUTCOMES else "abort")

    def account(self, buckets_ns: Mapping[str, int], tenant: str) -> None:
        """Add one HTTP request's ledger to the totals."""
        for state, amount_ns in buckets_ns.items():
            self.request_ns.add(amount_ns / NS, state, tenant)

    def snapshot(self) -> dict[str, Any]:
        """All that is counted, as plain values for `add` in another process."""
        return {name: family.snapshot() for name, family in vars(self).items()}

    def add(self, snapshot: Mapping[str, Any]) -> None:
        """Count what another process has counted on top."""
        for name, counted in snapshot.items():
            getattr(self, name).merge(counted)

    def tenant_page(self, model_name: str, tenant: str) -> str:
        """What is counted by tenant, of one of them: no line tells of another. Newline at its end."""
        common = label_text((("model_name", model_name),))
        lines: list[str] = []
        for family in vars(self).values():
            if isinstance(family, Counter) and "tenant" in family.label_names:
                lines += family.only("tenant", tenant).lines(common)
        return "\n".join(lines) + "\n"

    def page(self, model_name: str, info: Ready | None, status: Status | None, unhealthy: str | None) -> str:
        """The whole page, newline at its end."""
        common = label_text((("model_name", model_name),))
        lines: list[str] = []
        for family in vars(self).values():
            lines += family.lines(common)
        lines += _engine_lines(status, common)
        lines += _config_lines(info, common)
        ready = float(unhealthy is None)
        lines += gauge_line("steelyard:engine_ready", "1 while a token can be made, as /health says.", ready, common)
        return "\n".join(lines) + "\n"


def _engine_lines(status: Status | None, common: str) -> list[str]:
    """Gauges and counters of the engine; zeros before its first word."""
    now = status if status is not None else Status(0, 0, 0, {}, 0, 0, 0, 0, {}, False)
    total = max(now.blocks_total, 1)
    blocks: dict[Labels, float] = {
        (("state", "total"),): now.blocks_total,
        (("state", "clean"),): now.blocks_free - now.blocks_cached,
        (("state", "cached"),): now.blocks_cached,
        (("state", "active"),): now.blocks_active,
    }
    reasons: dict[Labels, float] = {
        (("reason", state.value),): now.waiting_by_reason.get(state.value, 0) for state in State if state.waiting
    }
    lines = gauge_line("vllm:num_requests_running", "Choices that hold a row.", now.running, common)
    lines += gauge_line("vllm:num_requests_waiting", "Choices that wait for one.", now.waiting, common)
    lines += gauge_lines("steelyard:num_requests_waiting_by_reason", "Why choices wait.", reasons, common)
    usage = now.blocks_active / total
    lines += gauge_line("vllm:kv_cache_usage_perc", "Share of KV blocks in use by requests.", usage, common)
    lines += gauge_lines("steelyard:kv_blocks", "Blocks: total = clean + cached (evictable) + active.", blocks, common)
    host: dict[Labels, float] = {
        (("state", state),): now.gauges.get(f"host_blocks_{state}", 0)
        for state in ("total", "clean", "cached", "swapped")
    }
    text = "Blocks of the host tier: total = clean + cached (evictable) + swapped (of displaced choices)."
    lines += gauge_lines("steelyard:host_blocks", text, host, common)
    stalled = now.stalled_ns / NS
    lines += gauge_line("steelyard:engine_stalled_seconds", "Since a step made progress, if due.", stalled, common)
    for key, (name, help) in ENGINE_COUNTERS.items():
        value = now.steps if key == "steps" else now.counters.get(key, 0)
        lines += counter_lines(name, help, value / NS if key.endswith("_ns") else value, common)
    for key, (name, help) in ENGINE_GAUGES.items():
        lines += gauge_line(name, help, now.gauges.get(key, 0), common)
    return lines


def _config_lines(info: Ready | None, common: str) -> list[str]:
    labels: Labels = ()
    if info is not None:
        labels = (
            ("block_size", str(info.block_size)),
            ("num_gpu_blocks", str(sum(info.num_blocks))),
            ("enable_prefix_caching", str(info.enable_prefix_caching)),
            ("kv_layout", info.kv_layout),
        )
    lines = gauge_lines("vllm:cache_config_info", "What the KV cache runs with.", {labels: 1}, common)
    every: Labels = ()
    if info is not None:
        every = tuple((key, _word(value)) for key, value in sorted(info.config.items()))
    return lines + gauge_lines("steelyard:config_info", "What the engine runs with.", {every: 1}, common)


def _word(value: object) -> str:
    """A setting as a label's value: as flags are written, an empty word for what is not set."""
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _seconds(ledger: Mapping[str, int], states: frozenset[str]) -> float:
    return sum(amount_ns for state, amount_ns in ledger.items() if state in states) / NS
