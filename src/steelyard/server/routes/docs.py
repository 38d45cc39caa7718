"""GET /openapi.json for programs, and /docs for people."""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from steelyard.server import openapi
from steelyard.server.responses import json_response


class Docs:
    """Handlers over the one document."""

    def __init__(self) -> None:
        self._document = openapi.document(version("steelyard"))
        self._page = openapi.page(self._document)

    async def document(self, request: Request) -> Response:
        return json_response(self._document)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page)
