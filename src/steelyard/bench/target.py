"""One request against an OpenAI-compatible server, from a plan to a record. Knows the wire format, not the load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from steelyard.bench.http import Exchange, TransportError
from steelyard.bench.record import RequestRecord
from steelyard.bench.stream import StreamReader
from steelyard.bench.workload import PlannedRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Client(Protocol):
    """What runs an exchange: bench.http.HttpClient, or a test's own."""

    async def exchange(self, exchange: Exchange) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestShape:
    """How every request is written. `extra` goes into each body as it is."""

    model: str
    endpoint: str = COMPLETIONS
    ignore_eos: bool = True
    token_ids: bool = False
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, request: PlannedRequest) -> bytes:
        """The JSON of one request, encoded before its time comes."""
        value: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        value |= {"max_tokens": request.output_len, "temperature": self.temperature}
        if self.endpoint == CHAT:
            value["messages"] = [{"role": "user", "content": request.text or ""}]
        else:
            value["prompt"] = request.prompt_ids if request.text is None else request.text
        if self.ignore_eos:
            value["ignore_eos"] = True
        if self.token_ids:
            value["return_token_ids"] = True
        return msgspec.json.encode(value | dict(self.extra))


class Target:
    """Sends planned requests and fills their records."""

    def __init__(self, client: Client, shape: RequestShape, clock: Callable[[], int], timeout_s: float) -> None:
        self._client, self.shape, self._clock, self._timeout_s = client, shape, clock, timeout_s

    async def send(self, body: bytes, record: RequestRecord) -> StreamReader:
        """Run one request. Failures go into the record; nothing is raised but cancellation.

        The timeout runs from the scheduled time: a request that waited in the client has less left.
        """
        reader = StreamReader()
        exchange = Exchange(self.shape.endpoint, body, reader.feed)
        left_s = self._timeout_s - (self._clock() - record.sched_ns) / 1e9
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                await self._client.exchange(exchange)
        except TransportError as error:
            began = exchange.status == 200
            record.failure, record.detail = ("truncated" if began else "connection"), str(error)
        except TimeoutError:
            record.failure, record.detail = "timeout", f"not done {self._timeout_s:g} s after its scheduled time"
        record.send_ns, record.headers_ns = exchange.sent_ns, exchange.headers_ns
        record.done_ns = exchange.done_ns if exchange.done_ns is not None else self._clock()
        record.status, record.events, record.usage = exchange.status, reader.events, reader.usage
        record.finish_reason, record.counted_tokens = reader.finish_reason, reader.counted_tokens
        record.ignore_eos = self.shape.ignore_eos
        if record.failure is None:
            record.failure, record.detail = _failure(exchange, reader)
        return reader


def _failure(exchange: Exchange, reader: StreamReader) -> tuple[str | None, str]:
    """What an exchange that ended in good order failed at."""
    if exchange.status != 200:
        kind = "http_4xx" if exchange.status is not None and 400 <= exchange.status < 500 else "http_5xx"
        return kind, f"{exchange.status}: {bytes(exchange.content[:300]).decode(errors='replace')}"
    if reader.error is not None:
        return "server_error", reader.error
    if not reader.done or reader.finish_reason is None:
        return "truncated", "the stream ended without " + ("a finish reason" if reader.done else "[DONE]")
    if not reader.events:
        return "empty", "no token came"
    return None, ""
