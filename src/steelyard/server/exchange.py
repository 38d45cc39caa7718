"""One HTTP request for tokens, from its body to its last byte: reading, errors, disconnect, and its ledger.

    body --> handler in a task of its own, raced against `http.disconnect` --> response
             the client leaves: the task is cancelled, and what it opened stops

Errors before the first byte become an HTTP error; later ones an error event, after which the stream ends without
[DONE]. The server learns of a disconnect in every state, streaming or not, because somebody always listens.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from steelyard.core.timed import State
from steelyard.errors import SteelyardError
from steelyard.server import sse
from steelyard.server.body import ClientGone, declared_bytes, decode, decode_lenient, read_body
from steelyard.server.connection import ABORT, WRITE
from steelyard.server.errors import RequestTimeout, error_body, error_headers
from steelyard.server.ledger import Account
from steelyard.server.service import Service, log
from steelyard.server.tenants import Tenant

T = TypeVar("T")

_JSON = [(b"content-type", b"application/json")]


class Exchange:
    """The response half, and the request's account.

    tenant    whose request it is
    headers   of the response, besides the usual ones; may be added to before it begins
    accepted  the engine has taken the request in: from then on it is not a refusal
    write_now writes complete events of a stream that has begun, without waiting; False: nothing is written, `write`
              can; with no bytes: whether it would
    """

    def __init__(self, service: Service, account: Account, tenant: Tenant, send: Send) -> None:
        self.service = service
        self.tenant = tenant
        self.headers: list[tuple[bytes, bytes]] = []
        self.accepted = False
        self.account = account
        self.arrived_ns = account.start_ns
        self.started = False
        self.write_now: Callable[[bytes], bool] = _cannot
        self._endpoint = account.endpoint
        self._send = send

    def decode(self, decoder: msgspec.json.Decoder[T], raw: bytes, unsupported: frozenset[str] = frozenset()) -> T:
        """The body as a struct. Fields that are not known are refused, or named in a header, as the operator says."""
        if not self.service.config.ignore_unknown_fields:
            return decode(decoder, raw, unsupported)
        body, ignored = decode_lenient(decoder, raw, unsupported)
        if ignored:
            names = ", ".join(ignored).encode("ascii", "backslashreplace")
            self.headers.append((b"x-steelyard-ignored-fields", re.sub(rb"[^ -~]", b"?", names)[:1000]))
        return body

    def to(self, state: State, now_ns: int | None = None) -> None:
        """Move the request's ledger on; `now_ns`: at an instant that has passed, if it is not before the last move."""
        now = self.service.clock_ns() if now_ns is None else max(now_ns, self.account.timed.since_ns)
        self.account.timed.to(state, now)

    async def respond(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """The whole response in one."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*_JSON, length, *(headers or [])])
        await self._send_to_reader({"type": "http.response.body", "body": body})

    async def write(self, events: bytes) -> None:
        """One or more complete events; the first call sends the headers."""
        if not self.started:
            await self._start(200, sse.HEADERS)
        await self._send_to_reader({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes = b"") -> None:
        await self._send_to_reader({"type": "http.response.body", "body": events, "more_body": False})

    def ledger(self) -> dict[str, Any]:
        """The account as it stands, for the response itself."""
        return self.account.so_far(self.service.clock_ns())

    async def fail(self, error: SteelyardError) -> None:
        """Tell the client, in the way that is still possible."""
        self.account.error = error.code
        if self.started:
            await self.end(sse.event(error_body(error)))
        else:
            if not self.accepted:
                self.service.metrics.rejections.add(1, error.code)
            await self.respond(error.status, error_body(error), error_headers(error))

    def close(self) -> None:
        """Nothing more happens to this request, here or in the engine."""
        self.service.close_account(self.account)

    async def _send_to_reader(self, message: dict[str, Any]) -> None:
        """Wait until the connection takes it. Raises ClientGone if it does not for `slow_client_timeout_s`."""
        limit_s, began_ns = self.service.config.slow_client_timeout_s, self.service.clock_ns()
        try:
            async with asyncio.timeout(limit_s):
                await self._send(message)
        except TimeoutError:
            log.warning("a client of %s has read nothing for %g s and is dropped", self._endpoint, limit_s)
            raise ClientGone from None
        finally:
            self.account.wrote(began_ns, self.service.clock_ns())

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        self.account.status = status
        self.service.metrics.responses.add(1, self._endpoint, str(status))
        self.service.metrics.tenant_responses.add(1, self.tenant.label, str(status))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})


Handler = Callable[[Exchange, bytes], Awaitable[None]]


class Endpoint:
    """An ASGI app for one POST route that makes tokens."""

    def __init__(self, service: Service, name: str, handler: Handler) -> None:
        self._service = service
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._service, scope["state"]["account"], scope["state"]["tenant"], send)
        exchange.to(State.HTTP_READ)
        exchange.write_now = scope.get("extensions", {}).get(WRITE, {}).get("call", _cannot)
        self._service.num_in_flight += 1
        try:
            body = await self._body(scope, receive)
            self._service.check_admits()
            await _unless_client_leaves(self._handler(exchange, body), receive)
        except ClientGone:
            _drop(scope)
        except SteelyardError as error:
            await exchange.fail(error)
        except Exception:
            log.exception("%s failed", self._name)
            await exchange.fail(SteelyardError("the server failed; the fault is in its log"))
        finally:
            self._service.num_in_flight -= 1
            exchange.account.when_over(exchange.close)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Raises BodyTooLarge, ClientGone, or RequestTimeout for a body that trickles in."""
        config = self._service.config
        declared = declared_bytes(dict(scope["headers"]).get(b"content-length", b""))
        try:
            async with asyncio.timeout(config.body_timeout_s):
                return await read_body(receive, declared, config.max_body_bytes)
        except TimeoutError:
            raise RequestTimeout(f"the body did not come within {config.body_timeout_s:g} s") from None


def _cannot(events: bytes) -> bool:
    return False


def _drop(scope: Scope) -> None:
    """Give up a connection with what is unsent on it: its reader has left, or does not read."""
    extension = scope.get("extensions", {}).get(ABORT)
    if extension is not None:
        extension["call"]()


async def _unless_client_leaves(work: Awaitable[None], receive: Receive) -> None:
    """Run `work` to its end, or cancel it and raise ClientGone when the client closes the connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left = not task.done()
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if left:
        raise ClientGone
    task.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
