"""A request's spans are its ledger: end to end as long as the request, on the caller's trace, without its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from threading import Event
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from steelyard.core.timed import State
from steelyard.errors import StartError
from steelyard.server.app import load_spans
from steelyard.server.ledger import Account
from steelyard.server.spans import Spans
from steelyard.text.tokenizer import Tokenizer
from tests.server.real_engine import RealEngine, serve
from tests.server.served import Served, wait_for
from tests.server.test_ledger import FailFirst

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "a very private word"


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    yield from serve(tokenizer, None, RealEngine(faults=FailFirst()))


@pytest.fixture(scope="module")
def trees(served: Served) -> dict[str, list[ReadableSpan]]:
    """By request id: the root, then its parts in order."""
    exporter, service = InMemorySpanExporter(), served.service
    service.spans = spans = Spans(exporter, "tiny", service.clock_ns)
    sampled, unsampled = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("plain", {"prompt": SECRET, "max_tokens": 4, "n": 2}, {}),
        ("called", {"prompt": [5] * 9, "max_tokens": 3}, {"traceparent": sampled, "tracestate": "a=b"}),
        ("unsampled", {"prompt": [5] * 9, "max_tokens": 3}, {"traceparent": unsampled}),
        ("odd", {"prompt": [5] * 9, "max_tokens": 3}, {"traceparent": "nonsense"}),
        ("refused", {"prompt": [5] * 9, "max_tokens": 0}, {}),
        ("failed", {"prompt": [5] * 13, "max_tokens": 3}, {}),
    ]
    for id, body, headers in asked:
        served.http.post("/v1/completions", json=body, headers={"x-request-id": id, **headers})
    wait_for(lambda: len(service.ledgers.last(9, None)) == len(asked), "all are over")
    spans.close()
    found: dict[str, list[ReadableSpan]] = {}
    all_spans = exporter.get_finished_spans()
    for root in (s for s in all_spans if s.kind.name == "SERVER"):
        parts = [s for s in all_spans if s.parent is not None and s.parent.span_id == root.context.span_id]
        found[str(attributes(root)["steelyard.request.id"])] = [root, *sorted(parts, key=_begin)]
    return found


def _begin(span: ReadableSpan) -> int:
    return span.start_time or 0


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_parts_lie_end_to_end_and_fill_the_request(trees: dict[str, list[ReadableSpan]]) -> None:
    for root, *parts in trees.values():
        assert parts and parts[0].start_time == root.start_time and parts[-1].end_time == root.end_time
        assert all(a.end_time == b.start_time for a, b in pairwise(parts))
    names = {part.name for part in trees["plain"][1:]}
    assert {"steelyard.auth", "steelyard.tokenize", "steelyard.prefill", "steelyard.decode"} <= names


def test_names_are_the_conventions_and_no_text_is_in_them(trees: dict[str, list[ReadableSpan]]) -> None:
    root = trees["plain"][0]
    said = attributes(root)
    assert root.name == "text_completion tiny"
    assert said["gen_ai.operation.name"] == "text_completion" and said["gen_ai.response.model"] == "tiny"
    assert said["gen_ai.usage.output_tokens"] == 8 and said["gen_ai.response.finish_reasons"] == ("length", "length")
    assert said["http.response.status_code"] == 200 and said["steelyard.outcome"] == "length"
    [event] = root.events
    assert event.name == "first token" and _begin(root) < event.timestamp < (root.end_time or 0)
    for spans in trees.values():
        assert all(SECRET.split()[2] not in span.to_json() for span in spans)


def test_the_callers_trace_goes_on_and_its_sampling_is_kept(trees: dict[str, list[ReadableSpan]]) -> None:
    root = trees["called"][0]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == CALLER
    assert all(f"{span.context.trace_id:032x}" == TRACE for span in trees["called"])
    assert "unsampled" not in trees
    assert trees["odd"][0].parent is None


def test_refusals_and_failures_say_why(trees: dict[str, list[ReadableSpan]]) -> None:
    refused, failed = trees["refused"][0], trees["failed"][0]
    assert attributes(refused)["http.response.status_code"] == 400 and attributes(refused)["error.type"]
    assert refused.status.status_code is StatusCode.UNSET and failed.status.status_code is StatusCode.ERROR


class Stuck(SpanExporter):
    """A collector that never answers."""

    def __init__(self) -> None:
        self._given_up = Event()
        self.was_given_up: bool | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.was_given_up = self._given_up.wait(25)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._given_up.set()


def test_a_collector_that_never_answers_is_given_up_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.server.spans.CLOSE_S", 0.05)
    exporter = Stuck()
    spans, account = Spans(exporter, "tiny", lambda: 0), Account("r", "/v1/completions", "t", 0, 0.0)
    account.timed.to(State.ENDED, 10)
    spans.add(account, account.record())
    spans.close()
    assert exporter.was_given_up is True


def test_an_endpoint_that_is_no_url_or_a_package_that_is_not_there_ends_the_start(monkeypatch: Any) -> None:
    assert load_spans(None, "tiny", lambda: 0) is None
    with pytest.raises(StartError, match="--otlp-traces-endpoint"):
        load_spans("localhost:4317", "tiny", lambda: 0)
    monkeypatch.setitem(__import__("sys").modules, "steelyard.server.spans", None)
    with pytest.raises(StartError, match=r"steelyard\[otel\]"):
        load_spans("http://localhost:4318/v1/traces", "tiny", lambda: 0)
