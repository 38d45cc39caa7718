"""A lean HTTP/1.1 client on asyncio for streams, made to measure: a body's bytes come with the time they arrived.

One exchange at a time on a connection; connections that the server keeps open are used again. No redirects, no
compression, no retries: each of them would be a latency nobody asked for.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from steelyard.errors import InvalidRequest

OnBody = Callable[[bytes, int], None]
"""Called with a piece of a body and when its bytes came, in nanoseconds of the client's clock."""


class TransportError(Exception):
    """The exchange broke below HTTP: no connection, a reset, or a body that ended too early."""


@dataclass(slots=True)
class Exchange:
    """One request and what is known of its answer so far."""

    path: str
    body: bytes = b""
    on_body: OnBody | None = None
    method: str = "POST"
    sent_ns: int | None = None
    headers_ns: int | None = None
    done_ns: int | None = None
    status: int | None = None
    content: bytearray = field(default_factory=bytearray)


class ResponseReader:
    """Turns the bytes of one response into status, body pieces and an end. Knows no sockets."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._buffer = bytearray()
        self._left: int | None = None  # bytes of the current chunk, or of the body; None: until the end of the stream
        self._chunked = False
        self.done = False
        self.keep_alive = True

    def feed(self, data: bytes, now_ns: int) -> None:
        """Raises TransportError for bytes that are no HTTP response."""
        if self._exchange.headers_ns is not None and not self._chunked:
            self._take(data, now_ns)
            return
        self._buffer += data
        if self._exchange.headers_ns is None and not self._headers(now_ns):
            return
        if self._chunked:
            self._chunks(now_ns)
        elif self._buffer:
            rest, self._buffer = bytes(self._buffer), bytearray()
            self._take(rest, now_ns)

    def eof(self, now_ns: int) -> None:
        """The server closed. Raises TransportError if the body was not complete."""
        if self.done:
            return
        if self._exchange.headers_ns is None or self._chunked or self._left is not None:
            raise TransportError("the connection closed before the response was complete")
        self._finish(now_ns)

    def _headers(self, now_ns: int) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        words = lines[0].split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise TransportError(f"not an HTTP response: {lines[0][:60]!r}")
        status = int(words[1])
        if status == 100:
            return self._headers(now_ns)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self.keep_alive = words[0] == b"HTTP/1.1" and headers.get(b"connection", b"").lower() != b"close"
        self._chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        if self._chunked:
            self._left = 0
        elif b"content-length" in headers:
            self._left = int(headers[b"content-length"])
        else:
            self.keep_alive = False
        self._exchange.status, self._exchange.headers_ns = status, now_ns
        if self._left == 0 and not self._chunked:
            self._finish(now_ns)
        return True

    def _take(self, data: bytes, now_ns: int) -> None:
        if self._left is not None:
            self._left -= len(data)
        self._emit(data, now_ns)
        if self._left is not None and self._left <= 0:
            self._finish(now_ns)

    def _chunks(self, now_ns: int) -> None:
        """Take whole chunks; a chunk split over reads is taken when its last byte came."""
        buffer, at = self._buffer, 0
        while True:
            line_end = buffer.find(b"\r\n", at)
            if line_end < 0:
                break
            try:
                size = int(bytes(buffer[at:line_end]).split(b";")[0], 16)
            except ValueError:
                raise TransportError(f"not a chunk size: {bytes(buffer[at:line_end][:20])!r}") from None
            end = line_end + 2 + size + 2
            if len(buffer) < end:
                break
            if size == 0:
                self._finish(now_ns)
                return
            self._emit(bytes(buffer[line_end + 2 : end - 2]), now_ns)
            at = end
        del buffer[:at]

    def _emit(self, data: bytes, now_ns: int) -> None:
        exchange = self._exchange
        if exchange.on_body is not None and exchange.status == 200:
            exchange.on_body(data, now_ns)
        else:
            exchange.content += data

    def _finish(self, now_ns: int) -> None:
        self.done = True
        self._exchange.done_ns = now_ns


class _Connection(asyncio.Protocol):
    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._reader: ResponseReader | None = None
        self._done: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods, not by its class

    def data_received(self, data: bytes) -> None:
        now_ns = self._clock()
        if self._reader is None:
            return
        try:
            self._reader.feed(data, now_ns)
        except TransportError as error:
            self._end(error)
            return
        if self._reader.done:
            self._end(None)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._reader is None:
            return
        try:
            self._reader.eof(self._clock())
        except TransportError as error:
            self._end(TransportError(f"{error}{f' ({exc})' if exc else ''}"))
            return
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        done, self._done = self._done, None
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    async def run(self, exchange: Exchange, head: bytes) -> bool:
        """Send and wait for the whole response; returns whether the connection may be used again."""
        assert self.transport is not None and self._reader is None
        reader = self._reader = ResponseReader(exchange)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(head + exchange.body)
        exchange.sent_ns = self._clock()
        await self._done
        self._reader = None
        return reader.keep_alive and not self.closed


class HttpClient:
    """Exchanges with one server. Connections are opened as needed, without a limit: a cap belongs to the load."""

    def __init__(self, base_url: str, clock: Callable[[], int], api_key: str | None = None) -> None:
        """Raises InvalidRequest for a URL that is not http(s)://host[:port][/path]."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"--base-url must be http://HOST:PORT, got {base_url!r}", param="base_url")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._clock = clock
        self._idle: list[_Connection] = []
        headers = [f"Host: {parts.netloc}", "Content-Type: application/json", "Accept: */*"]
        if api_key:
            headers.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(headers)

    async def exchange(self, exchange: Exchange) -> None:
        """Run one exchange. Raises TransportError; what was learnt before it stays in the exchange."""
        try:
            await self._exchange(exchange)
        except OSError as error:
            raise TransportError(f"{self._host}:{self._port}: {error.strerror or error}") from error

    async def _exchange(self, exchange: Exchange) -> None:
        connection = await self._connection()
        head = (
            f"{exchange.method} {self._prefix}{exchange.path} HTTP/1.1\r\n{self._headers}\r\n"
            f"Content-Length: {len(exchange.body)}\r\n\r\n"
        ).encode()
        reusable = False
        try:
            reusable = await connection.run(exchange, head)
        finally:
            if reusable:
                self._idle.append(connection)
            elif connection.transport is not None:
                connection.transport.abort()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: _Connection(self._clock), self._host, self._port, ssl=self._tls)
        return made

    def close(self) -> None:
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.abort()
        self._idle.clear()
