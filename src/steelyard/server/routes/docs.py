"""GET /openapi.json for programs, and /docs for people."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from steelyard import __version__
from steelyard.server import openapi
from steelyard.server.responses import json_response


class Docs:
    """Handlers over the one document."""

    def __init__(self) -> None:
        self._document = openapi.document(__version__)
        self._page = openapi.page(self._document)

    async def document(self, request: Request) -> Response:
        return json_response(self._document)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page)
