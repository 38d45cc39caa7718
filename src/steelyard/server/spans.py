"""A closed account as OpenTelemetry spans. Loaded only under --otlp-traces-endpoint: the SDK is an optional package.

    chat smollm2 |=============================================|   gen_ai.*, http.*, steelyard.* attributes
      steelyard.auth |=|                                             one span an account of the ledger, end to end in
      steelyard.tokenize |=|                                         order of life: together exactly as long as the
      steelyard.wait_kv    |=========| ...                           request. An account's time may have come in pieces.

Names are those of the semantic conventions for generative AI, and vLLM's where those have none. No text of a prompt or
an answer is in them. Spans are made when a request is over, on its caller's trace where it sent a `traceparent`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Timer
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from steelyard.core.timed import State
from steelyard.ledger.states import DESCRIPTIONS, TIMED_NAMES, group_of
from steelyard.server.ledger import Account

PROVIDER = "steelyard"
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
_FAILED = 500
CLOSE_S = 2.0


class Spans:
    """Makes spans and hands them to an exporter's own thread. Nothing here waits for a collector.

    clock_ns  the server's, on which accounts are kept; one reading joins it to the wall clock
    """

    def __init__(self, exporter: SpanExporter, model: str, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._exporter = exporter
        self._provider = TracerProvider(resource=Resource.create({"service.name": PROVIDER}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(PROVIDER)
        self._callers = TraceContextTextMapPropagator()
        self._model = model
        self._wall_ns = time.time_ns() - clock_ns()

    def add(self, account: Account, record: dict[str, Any]) -> None:
        """One tree of a closed account and its record."""
        operation = _OPERATIONS.get(account.endpoint, account.endpoint.rsplit("/", 1)[-1])
        begin_ns = account.start_ns + self._wall_ns
        root = self._tracer.start_span(
            f"{operation} {self._model}",
            self._callers.extract(account.trace_headers),
            SpanKind.SERVER,
            self._attributes(operation, record),
            start_time=begin_ns,
        )
        if root.is_recording():
            if record["ttft_ns"] is not None:
                root.add_event("first token", timestamp=begin_ns + record["ttft_ns"])
            if account.status >= _FAILED or record["outcome"] == "error":
                root.set_status(Status(StatusCode.ERROR, record["error"] or record["outcome"]))
            within, at_ns = set_span_in_context(root), begin_ns
            for name in TIMED_NAMES:
                took_ns = record["buckets_ns"].get(name, 0)
                if took_ns:
                    what = {"steelyard.group": group_of(name), "steelyard.description": DESCRIPTIONS[State(name)]}
                    part = self._tracer.start_span(f"steelyard.{name}", within, attributes=what, start_time=at_ns)
                    at_ns += took_ns
                    part.end(at_ns)
        root.end(begin_ns + record["total_ns"])

    def close(self) -> None:
        """Send what is left, for CLOSE_S at most: the SDK would try a collector that does not answer for 30 s."""
        patience = Timer(CLOSE_S, self._exporter.shutdown)
        patience.daemon = True
        patience.start()
        self._provider.shutdown()
        patience.cancel()

    def _attributes(self, operation: str, record: dict[str, Any]) -> dict[str, Any]:
        tokens, buckets = record["tokens"], record["buckets_ns"]
        queue_ns = sum(amount_ns for name, amount_ns in buckets.items() if group_of(name) == "waiting")
        found = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": record["id"],
            "gen_ai.response.finish_reasons": [choice["reason"] for choice in record["choices"]],
            "gen_ai.usage.input_tokens": tokens["prompt"],
            "gen_ai.usage.output_tokens": tokens["generated"],
            "gen_ai.latency.time_in_queue": queue_ns / 1e9,
            "gen_ai.latency.e2e": record["total_ns"] / 1e9,
            "http.request.method": "POST",
            "http.route": record["endpoint"],
            "http.response.status_code": record["status"],
            "steelyard.request.id": record["request_id"],
            "steelyard.tenant": record["tenant"],
            "steelyard.outcome": record["outcome"],
            "steelyard.cost_ns": record["cost_ns"],
            **{f"steelyard.tokens.{name}": tokens[name] for name in ("cached", "computed", "recomputed", "overshoot")},
        }
        if record["ttft_ns"] is not None:
            found["gen_ai.latency.time_to_first_token"] = record["ttft_ns"] / 1e9
        if record["error"]:
            found["error.type"] = record["error"]
        return found


def open_spans(endpoint: str, model: str, clock_ns: Callable[[], int]) -> Spans:
    """Spans over OTLP/HTTP to `endpoint`, a whole URL."""
    return Spans(OTLPSpanExporter(endpoint=endpoint), model, clock_ns)
