"""A server's own numbers from its /metrics page: parsed, sampled over time, subtracted. Absent is None, never zero."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from steelyard.bench.http import Exchange, TransportError
from steelyard.bench.target import Client

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

NAMES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "llamacpp:prompt_tokens_total"),
    "generation_tokens": (
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "llamacpp:tokens_predicted_total",
    ),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "ttft_s": ("vllm:time_to_first_token_seconds_sum", "sglang:time_to_first_token_seconds_sum"),
    "first_tokens": ("vllm:time_to_first_token_seconds_count", "sglang:time_to_first_token_seconds_count"),
    "queue_s": ("vllm:request_queue_time_seconds_sum",),
    "prefill_s": ("vllm:request_prefill_time_seconds_sum",),
    "decode_s": ("vllm:request_decode_time_seconds_sum",),
    "inference_s": ("vllm:request_inference_time_seconds_sum",),
    "requests_ended": ("vllm:e2e_request_latency_seconds_count", "vllm:request_success_total"),
    "recomputed_tokens": ("steelyard:recomputed_tokens_total",),
    "overshoot_tokens": ("steelyard:overshoot_tokens_total",),
    "steps": ("steelyard:steps_total",),
    "prefill_chunks": ("steelyard:prefill_chunks_total",),
    "device_s": ("steelyard:step_device_seconds_total",),
    "step_tokens": ("steelyard:step_tokens_total",),
    "padded_tokens": ("steelyard:padded_tokens_total",),
    "held_slots": ("steelyard:held_slots_total",),
    "kv_fragmented": ("steelyard:kv_fragmented_total",),
    "kv_slack_tokens": ("steelyard:kv_slack_tokens",),
    "kv_blocks_peak": ("steelyard:kv_blocks_peak",),
    "kv_largest_run": ("steelyard:kv_largest_run_blocks",),
}
"""Our word, and what servers have called it, newest first. Counters are summed over labels."""

Page = dict[str, list[tuple[dict[str, str], float]]]


def parse(text: str) -> Page:
    """Samples by name, with their labels. Lines that are no samples are skipped."""
    page: Page = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        page.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), number))
    return page


def values_of(page: Page) -> dict[str, float | None]:
    """Each of NAMES under the first name the page has; None where it has none of them."""
    found: dict[str, float | None] = {}
    for word, names in NAMES.items():
        samples = next((page[name] for name in names if name in page), None)
        found[word] = None if samples is None else sum(value for _, value in samples)
    return found


def labelled(page: Page, name: str, label: str) -> dict[str, float]:
    """Values of one family by one of its labels."""
    found: dict[str, float] = {}
    for labels, value in page.get(name, ()):
        key = labels.get(label, "")
        found[key] = found.get(key, 0.0) + value
    return found


INSTRUMENTS = ("check_invariants", "profile", "enable_log_requests", "kv_cache_metrics")
_CONFIGS = ("steelyard:config_info", "vllm:cache_config_info")


def instruments_of(page: Page) -> list[str] | None:
    """Settings that slow a server to watch it and are on, by its own word; None if it says nothing of its settings."""
    said = [labels for name in _CONFIGS for labels, _ in page.get(name, ())]
    if not said:
        return None
    on = {key for labels in said for key in INSTRUMENTS if labels.get(key, "").lower() in ("true", "1")}
    return sorted(on)


@dataclass(frozen=True, slots=True)
class Sample:
    """The page at a time, in nanoseconds of the run's clock."""

    t_ns: int
    values: dict[str, float | None]


@dataclass(slots=True)
class ServerSide:
    """What the server said of a run: samples over time, and the whole pages before and after it."""

    samples: list[Sample] = field(default_factory=list)
    before: Page = field(default_factory=dict)
    after: Page = field(default_factory=dict)

    @property
    def seen(self) -> bool:
        return bool(self.before) and bool(self.after)

    def delta(self, word: str) -> float | None:
        """How much a counter grew over the run; None if it was absent or restarted."""
        first, last = values_of(self.before)[word], values_of(self.after)[word]
        return None if first is None or last is None or last < first else last - first

    def label_deltas(self, name: str, label: str) -> dict[str, float]:
        first, last = labelled(self.before, name, label), labelled(self.after, name, label)
        return {key: value - first.get(key, 0.0) for key, value in last.items()}

    def series(self, word: str) -> list[tuple[int, float]]:
        """Samples of a gauge where it was present."""
        return [(s.t_ns, value) for s in self.samples if (value := s.values.get(word)) is not None]


async def fetch(client: Client, path: str = "/metrics") -> tuple[int | None, str]:
    """(status, text) of a GET; (None, why) if there was no answer."""
    exchange = Exchange(path, method="GET")
    try:
        await client.exchange(exchange)
    except TransportError as error:
        return None, str(error)
    return exchange.status, bytes(exchange.content).decode(errors="replace")


class Scraper:
    """Samples a metrics page at an interval on a connection of its own while a load runs."""

    def __init__(
        self, client: Client, clock: Callable[[], int], interval_s: float = 0.5, settle_s: float = 0.3
    ) -> None:
        self._client, self._clock, self._interval_s, self._settle_s = client, clock, interval_s, settle_s
        self.side = ServerSide()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """The page before the load, after what came earlier has been counted; then sampling begins if there is one."""
        await asyncio.sleep(self._settle_s)
        self.side.before = await self._page()
        if self.side.before:
            self._task = asyncio.create_task(self._sample())

    async def stop(self) -> ServerSide:
        """Counters may lag by a status interval, so the page after is taken a little later."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await asyncio.sleep(self._settle_s)
            self.side.after = await self._page()
        return self.side

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            t_ns = self._clock()
            page = await self._page()
            if page:
                self.side.samples.append(Sample(t_ns, values_of(page)))

    async def _page(self) -> Page:
        status, text = await fetch(self._client)
        return parse(text) if status == 200 else {}


def mean_of(points: Sequence[tuple[int, float]]) -> float | None:
    """Plain mean of evenly spaced samples; None without any."""
    return sum(v for _, v in points) / len(points) if points else None
