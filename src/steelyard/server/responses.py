"""Small JSON responses for routes that answer at once."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from steelyard.errors import SteelyardError
from steelyard.server.errors import error_body, error_headers


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(error: SteelyardError, headers: dict[str, str] | None = None) -> Response:
    own = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), error.status, {**own, **(headers or {})}, media_type="application/json")
