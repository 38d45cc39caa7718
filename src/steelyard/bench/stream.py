"""From the bytes of an OpenAI stream to token events and usage. Takes time from outside; knows no sockets.

What never counts as a token: a role alone, an empty text without token ids, a comment, a usage-only chunk, [DONE].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from steelyard.bench.record import TokenEvent, Usage

_decode = msgspec.json.Decoder().decode


class SseReader:
    """Splits a byte stream into the data of its events: comments dropped, lines of one event joined."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is complete now."""
        lines = (self._buffer + data).split(b"\n")
        self._buffer = lines.pop()
        found = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found


@dataclass(slots=True)
class StreamReader:
    """What one stream has said so far. `feed` takes body bytes with the time they came."""

    events: list[TokenEvent] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    error: str | None = None
    done: bool = False
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    _sse: SseReader = field(default_factory=SseReader)
    _seen: int = 0

    @property
    def counted_tokens(self) -> int | None:
        """Tokens by the ids in the stream; None: it had none."""
        return len(self.token_ids) or None

    def feed(self, data: bytes, now_ns: int) -> None:
        for payload in self._sse.feed(data):
            if payload == b"[DONE]":
                self.done = True
                continue
            try:
                chunk = _decode(payload)
            except msgspec.DecodeError as error:
                self.error = f"an event is not JSON: {error}"
                continue
            if isinstance(chunk, dict):
                self._chunk(chunk, now_ns)

    def _chunk(self, chunk: dict[str, Any], now_ns: int) -> None:
        if chunk.get("error") is not None:
            error = chunk["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage(usage)
        for choice in chunk.get("choices") or ():
            self._choice(choice, isinstance(usage, dict), now_ns)

    def _choice(self, choice: dict[str, Any], counted: bool, now_ns: int) -> None:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        ids = choice.get("token_ids")
        channel, text = _text_of(choice)
        if text:
            self.text.append(text)
        if not text and not ids:
            return
        num_new = None
        if ids:
            self.token_ids += ids
            num_new = len(ids)
        elif counted and self.usage.completion_tokens is not None:
            # A server that sends usage with every chunk: tokens whose text was held back count with this event.
            num_new, self._seen = self.usage.completion_tokens - self._seen, self.usage.completion_tokens
        self.events.append(TokenEvent(now_ns, channel, num_new if num_new != 0 else None, len(text)))

    def _usage(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        thought = usage.get("completion_tokens_details") or {}
        self.usage = Usage(
            usage.get("prompt_tokens"),
            details.get("cached_tokens"),
            usage.get("completion_tokens"),
            thought.get("reasoning_tokens"),
        )


def _text_of(choice: dict[str, Any]) -> tuple[str, str]:
    """(channel, new text) of a choice: completions' `text`, or the parts of a chat delta."""
    if "delta" not in choice:
        return "content", choice.get("text") or ""
    delta = choice["delta"] or {}
    if delta.get("content"):
        return "content", delta["content"]
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    if thought:
        return "reasoning", thought
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    return "tool", "".join((f.get("name") or "") + (f.get("arguments") or "") for f in calls)
