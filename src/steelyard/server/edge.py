"""The outermost application: what is true of every request, before any route sees it.

    CORS preflight -> declared body size (413) -> key (401) -> route; every response carries x-request-id

Only the response's first message is touched: an event of a stream costs one more call and nothing else. A request that
is weighed has an account from here on, `auth` first; one that is refused here closes it here.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from steelyard.errors import SteelyardError
from steelyard.server.body import declared_bytes, too_large
from steelyard.server.connection import ABORT
from steelyard.server.errors import ShuttingDown, error_body, error_headers
from steelyard.server.ledger import Account
from steelyard.server.routes.page import PATHS as PAGE_PATHS
from steelyard.server.service import Service

Header = tuple[bytes, bytes]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
_OPEN_PATHS = frozenset({"/health", "/live"}) | PAGE_PATHS


class Edge:
    """Wraps the router. Puts `tenant` and `request_id` into the scope's state; `account` too for endpoints.

    endpoints  apps of the POST routes that are weighed, by path: they answer every error and need nothing of the router
    """

    def __init__(self, app: ASGIApp, service: Service, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._endpoints = endpoints
        self._service = service
        config = service.config
        self._origins = frozenset(origin.encode() for origin in config.allowed_origins)
        self._open_paths = _OPEN_PATHS | ({"/metrics"} if config.public_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "this server speaks HTTP only"
        headers: dict[bytes, bytes] = dict(scope["headers"])
        asked_id = headers.get(b"x-request-id", b"")
        request_id = asked_id if _REQUEST_ID.fullmatch(asked_id) else uuid.uuid4().hex.encode()
        extra: list[Header] = [(b"x-request-id", request_id), *self._cors(headers)]
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers and len(extra) > 1:
            await _respond(send, 204, [*extra, *_preflight(headers)], b"")
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        account = self._account(scope, path)
        try:
            declared = declared_bytes(headers.get(b"content-length", b""))
            if declared is not None and declared > self._service.config.max_body_bytes:
                raise too_large(self._service.config.max_body_bytes)
            state["tenant"] = None
            if path not in self._open_paths:
                state["tenant"] = tenant = self._service.tenants.identify(headers.get(b"authorization"))
                if account is not None:
                    account.tenant = tenant.label
        except SteelyardError as error:
            self._service.metrics.rejections.add(1, error.code)
            try:
                await _respond(send, error.status, [*extra, *self._last(), *error_headers(error)], error_body(error))
            finally:
                if account is not None:
                    account.status, account.error = error.status, error.code
                    self._service.close_account(account)
            return

        started = False

        async def send_with(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *extra, *self._last()]
            await send(message)

        app = self._endpoints.get(path) if scope["method"] == "POST" else None
        try:
            await (app or self._app)(scope, receive, send_with)
        except asyncio.CancelledError:
            await _cut_off(scope, None if started else partial(_respond, send_with))

    def _last(self) -> list[Header]:
        """What ends the connection once the server drains: its next request would find nobody."""
        return [(b"connection", b"close")] if self._service.draining else []

    def _account(self, scope: Scope, path: str) -> Account | None:
        """A request's account from its first moment, nobody's until its key is known; None for what is not weighed."""
        if scope["method"] != "POST" or path not in self._endpoints:
            return None
        service, state = self._service, scope["state"]
        account = Account(state["request_id"], path, "", service.clock_ns(), service.wall_s())
        if service.spans is not None:
            account.trace_headers = {
                name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS
            }
        state["account"] = account
        return account

    def _cors(self, headers: dict[bytes, bytes]) -> list[Header]:
        """What allows a page of this origin to read the response; nothing for one that is not allowed."""
        origin = headers.get(b"origin")
        if origin is None or not (origin in self._origins or b"*" in self._origins):
            return []
        shown = b"*" if b"*" in self._origins else origin
        return [
            (b"access-control-allow-origin", shown),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]


async def _cut_off(scope: Scope, respond: Callable[..., Awaitable[None]] | None) -> None:
    """The server closes and waits for nobody: say so if that is still possible without waiting, and hang up."""
    if respond is not None:
        error = ShuttingDown("the server shut down before this request had come")
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await respond(error.status, error_headers(error), error_body(error))
                return
    if (extension := scope.get("extensions", {}).get(ABORT)) is not None:
        extension["call"]()
    await asyncio.sleep(0)  # until the connection knows that it is lost: then nothing of it is logged


def _preflight(headers: dict[bytes, bytes]) -> Iterable[Header]:
    yield b"access-control-allow-methods", b"GET, POST, DELETE"
    yield b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"authorization")
    yield b"access-control-max-age", b"600"


async def _respond(send: Send, status: int, headers: list[Header], body: bytes) -> None:
    kind = [(b"content-type", b"application/json")] if body else []
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*kind, length, *headers]})
    await send({"type": "http.response.body", "body": body})
