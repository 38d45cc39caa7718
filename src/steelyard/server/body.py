"""From the bytes of a request's body to a typed struct, or an InvalidRequest that names the field.

    bytes --read_body--> bytes within the limit --decode--> struct

msgspec stops at the first fault and ends its message with the fault's path; the path becomes `param`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from steelyard.errors import InvalidRequest
from steelyard.server.errors import BodyTooLarge

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_IGNORED = 32
"""Unknown fields of one request that may be left out; more are refused."""
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_PATH = re.compile(r"^(?P<text>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive, declared_bytes: int | None, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as the limit is known to be passed, ClientGone on a disconnect.

    What is not read here is read and thrown away by the HTTP server, so that a client that sends first and reads
    later finds the refusal and not a reset connection.
    """
    if declared_bytes is not None and declared_bytes > limit_bytes:
        raise too_large(limit_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > limit_bytes:
            raise too_large(limit_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def decode_lenient(
    decoder: msgspec.json.Decoder[T], body: bytes, unsupported: frozenset[str] = frozenset()
) -> tuple[T, list[str]]:
    """The same, but fields that are not known are left out; returns the paths of those too."""
    ignored: list[str] = []
    while True:
        try:
            return decode(decoder, body, unsupported), ignored
        except InvalidRequest as error:
            if error.code != "unknown_parameter" or error.param is None or len(ignored) == MAX_IGNORED:
                raise
            try:
                body = _without(body, error.param)
            except (LookupError, TypeError, ValueError, RecursionError, msgspec.MsgspecError):
                raise error from None  # a name that is no path of ours cannot be left out
            ignored.append(error.param)


def _without(body: bytes, path: str) -> bytes:
    """The JSON without the field at `path`, such as `messages[0].name`."""
    value = whole = msgspec.json.decode(body)
    *steps, last = _STEP.findall(path)
    for name, index in steps:
        value = value[name] if name else value[int(index)]
    del value[last[0]]
    return msgspec.json.encode(whole)


def decode(decoder: msgspec.json.Decoder[T], body: bytes, unsupported: frozenset[str] = frozenset()) -> T:
    """The body as the decoder's type. Raises InvalidRequest with the path of the first bad field.

    Fields named in `unsupported` are known and typed to be null: anything else in them is refused by name.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), unsupported, decoder.type) from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        text = str(error)
        if text.startswith("Input data was truncated"):
            text = "it ends too early or holds a lone surrogate"
        raise InvalidRequest(f"the body is not valid JSON: {text}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def _invalid(message: str, unsupported: frozenset[str], kind: Any) -> InvalidRequest:
    match = _PATH.match(message)
    assert match is not None
    text, path = match["text"], match["path"] or ""
    if match["key"]:
        text = f"a key: {text}"
    for pattern, code in ((_UNKNOWN, "unknown_parameter"), (_MISSING, "missing_required_parameter")):
        if named := pattern.match(text):
            param = f"{path}.{named['name']}" if path else named["name"]
            what = "is not a field this server knows" if code == "unknown_parameter" else "is required"
            return InvalidRequest(f"{param[:200]}: {what}", param=param[:200], code=code)
    if path in unsupported:
        return InvalidRequest(
            f"{path}: is not supported by this server; leave it out", param=path, code="unsupported_parameter"
        )
    if not path:
        return InvalidRequest(f"the body: {text}", code="invalid_type")
    if text.startswith("Invalid enum value") and (values := _values_at(kind, path)):
        text += f"; it can be {' or '.join(values)}"
    return InvalidRequest(f"{path}: {text}", param=path, code="invalid_type")


def _values_at(kind: Any, path: str) -> list[str]:
    """The words that a field of `kind` at `path` can be, as JSON has them; none if it is not one of a few words."""
    kinds = _each(inspect.type_info(kind))
    for name, _ in _STEP.findall(path):
        inner: list[inspect.Type] = []
        for one in kinds:
            if isinstance(one, inspect.StructType):
                inner += [field.type for field in one.fields if field.encode_name == name]
            elif isinstance(one, inspect.ListType) and not name:
                inner.append(one.item_type)
        kinds = [part for one in inner for part in _each(one)]
    words = [value for one in kinds if isinstance(one, inspect.LiteralType) for value in one.values]
    return [msgspec.json.encode(word).decode() for word in words]


def _each(kind: inspect.Type) -> list[inspect.Type]:
    """The types of a union; a type that is none is the only one."""
    return [one for part in kind.types for one in _each(part)] if isinstance(kind, inspect.UnionType) else [kind]


def declared_bytes(header: bytes) -> int | None:
    """What a content-length header says, if it says a number."""
    return int(header) if header.isdigit() and len(header) < 20 else None


def too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than {limit_bytes} bytes; send less, or raise --max-body-bytes")
