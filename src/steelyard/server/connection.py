"""One TCP connection: what uvicorn's httptools protocol lacks, limits on a request's head and a time to send it.

    connect --head_timeout--> head complete --> the application
            |-- too long or too many headers: 431      |-- too slow: 408, closed

A client that opens connections and sends little or nothing holds each for `head_timeout_s` and a few kilobytes.
Bodies have limits of their own, where they are read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from steelyard.errors import InvalidRequest, SteelyardError
from steelyard.server.errors import HeadTooLarge, RequestTimeout, error_body

ABORT = "steelyard.abort"
"""Name of the ASGI extension: a callable that drops the connection with what is still unsent."""
WRITE = "steelyard.write"
"""Another: a callable that writes a piece of a body that has begun, at once; False: it cannot, nothing is written."""
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Of a request's line and headers together: bytes, number of headers, and seconds until they are complete."""

    max_bytes: int
    max_count: int
    timeout_s: float


class BoundedHttp(HttpToolsProtocol):
    """Answers a head that breaks a limit by itself, in JSON, and closes."""

    def __init__(self, *args: Any, limits: HeadLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._num_bytes = 0
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: SteelyardError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._limits.timeout_s, self._expired)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._num_bytes += len(data)
        if self._num_bytes > self._limits.max_bytes:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_bytes = True, 0
        self._refusal = None
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.timeout_s, self._expired)
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self._limits.max_count:
            self._refusal = self._too_large()
            raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self._limits.max_bytes:
            self._refusal = self._too_large()
            raise ValueError("too large a head")
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            self.scope["extensions"][WRITE] = {"call": partial(self._write, cycle)}

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or InvalidRequest(f"this is not HTTP: {msg}", code="invalid_http"))

    def _write(self, cycle: RequestResponseCycle, piece: bytes) -> bool:
        """A chunk of a chunked body; an empty piece only asks. A connection that is behind is waited for elsewhere."""
        over = cycle.response_complete or cycle.disconnected
        if over or not (cycle.response_started and cycle.chunked_encoding) or self.flow.write_paused:
            return False
        if piece:
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def _expired(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            if self._num_bytes:
                self._refuse(RequestTimeout(f"the headers did not come within {self._limits.timeout_s:g} s"))
            else:
                self.transport.close()

    def _refuse(self, error: SteelyardError) -> None:
        body = error_body(error)
        head = (
            f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _too_large(self) -> HeadTooLarge:
        limits = self._limits
        return HeadTooLarge(
            f"the request's line and headers may have {limits.max_bytes} bytes and {limits.max_count} headers "
            "(--max-header-bytes, --max-header-count)"
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
