"""The few exceptions a user can meet. Each carries what an HTTP error body needs; nothing here knows HTTP."""

from __future__ import annotations


class SteelyardError(Exception):
    """Base of all errors meant for a user.

    `status` is the HTTP status a server answers with, `code` a stable word for programs, `param` the field at
    fault (None if no single field is), and the message one sentence that names the value's limit and what to do.
    """

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(SteelyardError):
    """A field of a request has a value that cannot be served, now or later."""

    status = 400
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit a limit; the message has their numbers and the limit's."""

    code = "context_length_exceeded"


class NotFound(SteelyardError):
    """The named model or route does not exist here."""

    status = 404
    code = "not_found"


class Overloaded(SteelyardError):
    """The system cannot take this request now; `retry_after_s` says when to try again."""

    status = 503
    code = "overloaded"

    def __init__(
        self, message: str, *, retry_after_s: float, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class EngineDead(SteelyardError):
    """The engine has stopped or makes no progress; the message says which and for how long."""

    status = 503
    code = "engine_unavailable"


class RequestFailed(SteelyardError):
    """The engine accepted the request and could not finish it (out of memory, NaN, a broken invariant)."""

    status = 500
    code = "request_failed"


class StartError(SteelyardError):
    """Starting failed; the message is one line a person can act on."""

    code = "start_failed"


class CheckpointError(StartError):
    """A model's files are missing, damaged or of an unsupported kind; the message names the file or tensor."""

    code = "bad_checkpoint"


def reason(error: Exception) -> str:
    """Why it failed, in words for a user: an OSError without its number and the path, which the caller has named."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
