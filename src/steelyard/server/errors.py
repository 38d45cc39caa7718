"""Error bodies in OpenAI's shape, and the few errors only an HTTP server can meet. No routing, no logging."""

from __future__ import annotations

import math

import msgspec

from steelyard.errors import InvalidRequest, NotFound, Overloaded, SteelyardError


class BodyTooLarge(InvalidRequest):
    """The request's body has more bytes than `--max-body-bytes` allows."""

    status = 413
    code = "body_too_large"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class ModelNotFound(NotFound):
    code = "model_not_found"


class ShuttingDown(SteelyardError):
    """The server finishes what runs and takes nothing new."""

    status = 503
    code = "shutting_down"


def error_type(status: int) -> str:
    """OpenAI's word for a class of errors: clients choose by it whether to retry."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(error: SteelyardError) -> bytes:
    """`{"error": {message, type, param, code}}` as JSON bytes."""
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error_type(error.status),
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_headers(error: SteelyardError) -> list[tuple[bytes, bytes]]:
    """Headers that go with an error besides its content type."""
    if isinstance(error, Overloaded):
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
    return []
