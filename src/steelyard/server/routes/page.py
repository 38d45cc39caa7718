"""GET / and /static/{name}: the live page. Files of this package and of no other host; they hold no data of anybody."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from steelyard.errors import NotFound

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "live.css": "text/css; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
}
PATHS = frozenset({"/", *(f"/static/{name}" for name in _TYPES)})
"""What is answered without a key."""

_HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
}


class Page:
    """The files, read once."""

    def __init__(self) -> None:
        folder = files("steelyard.server").joinpath("static")
        self._files = {name: folder.joinpath(name).read_bytes() for name in _TYPES}

    async def index(self, request: Request) -> Response:
        return self._file("index.html")

    async def static(self, request: Request) -> Response:
        """Raises NotFound."""
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise NotFound(f"static/{name[:100]}: there is no such file")
        return Response(content, headers={"content-type": _TYPES[name], **_HEADERS})
