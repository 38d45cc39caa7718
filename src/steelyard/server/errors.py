"""Error bodies in OpenAI's shape, and the few errors only an HTTP server can meet. No routing, no logging."""

from __future__ import annotations

import math

import msgspec

from steelyard.errors import InvalidRequest, NotFound, Overloaded, SteelyardError
from steelyard.wire.messages import Refused

RESTART_S = 5.0
"""When to ask again a server that ends: what replaces it needs about so long to start."""


class BodyTooLarge(InvalidRequest):
    """The request's body has more bytes than `--max-body-bytes` allows."""

    status = 413
    code = "body_too_large"


class HeadTooLarge(InvalidRequest):
    """The request's line and headers are longer or more than allowed."""

    status = 431
    code = "headers_too_large"


class RequestTimeout(InvalidRequest):
    """The client took too long to send its request."""

    status = 408
    code = "request_timeout"


class Unauthorized(SteelyardError):
    """No key, or one that is not known."""

    status = 401
    code = "invalid_api_key"


class Forbidden(SteelyardError):
    """A known key without the right to do this."""

    status = 403
    code = "forbidden"


class DeadlineExceeded(SteelyardError):
    """The client's own time limit passed before the first token."""

    status = 504
    code = "deadline_exceeded"


class TenantLimit(Overloaded):
    """A limit of this tenant alone is reached; others may still be served."""

    status = 429
    code = "rate_limit_exceeded"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class ModelNotFound(NotFound):
    code = "model_not_found"


class ShuttingDown(Overloaded):
    """The server finishes what runs and takes nothing new; one that takes its place needs some seconds to start."""

    code = "shutting_down"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=RESTART_S)


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
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, Overloaded):
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
    return []


def refusal(refused: Refused) -> SteelyardError:
    """The engine's refusal as the error a client gets."""
    error: SteelyardError
    if refused.retry_after_s is not None:
        error = Overloaded(refused.message, retry_after_s=refused.retry_after_s, param=refused.param, code=refused.code)
    else:
        error = SteelyardError(refused.message, param=refused.param, code=refused.code)
    error.status = refused.status
    return error
