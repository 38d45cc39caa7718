"""Server-sent events as bytes: `data: JSON` and an empty line, then exactly one [DONE]. No comments; names in one API.

A chunk of a stream is a constant prefix, the encoded text, and a suffix: nothing but the text is encoded per event.
JSON escapes every newline, so a text cannot break the framing.
"""

from __future__ import annotations

import msgspec

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """One event of JSON bytes without raw newlines."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """One event of /v1/responses, which has names and no [DONE]."""
    return b"event: " + name.encode() + b"\n" + event(data)


class ChunkFormat:
    """Writes the chunks of one stream: everything around `choices` is the same in each.

    data: {"id":...,"object":...,"created":...,"model":...,"choices":[ CHOICE ],"usage":null}
          '---------------------- prefix ---------------------------'  '----- suffix ----'
    """

    def __init__(self, id: str, object: str, created_s: int, model: str, include_usage: bool) -> None:
        head = encode({"id": id, "object": object, "created": created_s, "model": model})
        self._head = b"data: " + head[:-1]
        self._prefix = self._head + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """The event around one choice's JSON."""
        return self._prefix + choice + self._suffix

    def ledger(self, ledger: bytes) -> bytes:
        """An event with no choices but the request's ledger, where it was asked for."""
        return self._head + b',"choices":[],"ledger":' + ledger + b"}\n\n"

    def usage(self, usage: bytes) -> bytes:
        """The last event before [DONE]: no choices, the usage."""
        return self._head + b',"choices":[],"usage":' + usage + b"}\n\n"
