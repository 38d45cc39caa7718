"""HTTP and event streams in pieces of any size; tokens on every channel; counts only where the server gives them."""

from __future__ import annotations

import pytest

from steelyard.bench.http import Exchange, ResponseReader, TransportError
from steelyard.bench.stream import SseReader, StreamReader
from tests.bench.rig import HEAD, chunked, sse, text_chunk, usage_chunk

BODY = text_chunk("a") + text_chunk("b") + text_chunk("c", "stop") + usage_chunk(4, 3, 2) + sse(b"[DONE]")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_a_response_in_pieces_of_any_size_is_the_same(size: int) -> None:
    reader = StreamReader()
    exchange = Exchange("/", on_body=reader.feed)
    http = ResponseReader(exchange)
    data = HEAD + b"".join(chunked(BODY[i : i + 11]) for i in range(0, len(BODY), 11)) + b"0\r\n\r\n"
    for at in range(0, len(data), size):
        http.feed(data[at : at + size], at)
    assert http.done and http.keep_alive and exchange.status == 200
    assert [e.num_chars for e in reader.events] == [1, 1, 1] and "".join(reader.text) == "abc"
    assert (reader.usage.prompt_tokens, reader.usage.completion_tokens, reader.usage.cached_tokens) == (4, 3, 2)
    assert reader.done and reader.finish_reason == "stop"


def test_an_event_has_the_time_its_last_byte_came() -> None:
    reader = StreamReader()
    event = text_chunk("a")
    reader.feed(event[:-1], 5)
    assert not reader.events
    reader.feed(event[-1:] + text_chunk("b")[:4], 9)
    assert [e.t_ns for e in reader.events] == [9]


def test_a_body_of_known_length_and_one_until_the_end() -> None:
    exchange = Exchange("/")
    http = ResponseReader(exchange)
    http.feed(b"HTTP/1.1 404 No\r\ncontent-length: 4\r\n\r\nab", 1)
    assert not http.done
    http.feed(b"cd", 2)
    assert http.done and bytes(exchange.content) == b"abcd" and exchange.done_ns == 2
    http = ResponseReader(exchange := Exchange("/"))
    http.feed(b"HTTP/1.0 200 OK\r\n\r\nxy", 1)
    http.eof(3)
    assert http.done and not http.keep_alive and bytes(exchange.content) == b"xy"


def test_broken_responses_are_said_to_be_broken() -> None:
    for data in (b"SSH-2.0\r\n\r\n", HEAD + b"zz\r\n"):
        with pytest.raises(TransportError):
            ResponseReader(Exchange("/")).feed(data, 0)
    http = ResponseReader(Exchange("/"))
    http.feed(HEAD + chunked(b"half"), 0)
    with pytest.raises(TransportError, match="before the response was complete"):
        http.eof(1)


def test_events_with_comments_crlf_and_several_lines() -> None:
    assert SseReader().feed(b": hi\r\n\r\nevent: x\r\ndata: 1\r\ndata:2\r\n\r\n") == [b"1\n2"]


def test_reasoning_and_tool_calls_are_tokens() -> None:
    reader = StreamReader()
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"function": {"arguments": "{}"}}]},
        {"content": "x"},
    ):
        reader.feed(sse({"choices": [{"index": 0, "delta": delta}]}), 0)
    assert [e.channel for e in reader.events] == ["reasoning", "tool", "tool", "content"]


def test_tokens_an_event_come_from_ids_or_from_usage_with_every_chunk() -> None:
    reader = StreamReader()
    reader.feed(text_chunk("", ids=[7]) + text_chunk("ab", ids=[8, 9]), 0)
    assert [e.num_tokens for e in reader.events] == [1, 2] and reader.counted_tokens == 3
    reader = StreamReader()
    for text, completion in (("a", 1), ("", 2), ("b", 3)):
        usage = {"prompt_tokens": 1, "completion_tokens": completion}
        reader.feed(sse({"choices": [{"index": 0, "text": text}], "usage": usage}), 0)
    assert [e.num_tokens for e in reader.events] == [1, 2], "a token whose text was held back counts with the next"


def test_an_error_inside_a_stream_is_kept() -> None:
    reader = StreamReader()
    reader.feed(sse({"error": {"message": "out of memory"}}) + sse(b"{broken"), 0)
    assert reader.error is not None and "not JSON" in reader.error
