"""Tokens of a running stream are written where they arrive; a client reads the same as by way of the handler."""

from __future__ import annotations

import json
from typing import Any

import pytest

from steelyard.server import exchange
from steelyard.server.collector import Collector
from steelyard.server.run import Choice, Chunk
from tests.server.served import Served, chunks, events


def joined(data: list[str]) -> dict[int, list[Any]]:
    """By choice: text, ids, tokens with logprobs, and how it ended; events may be cut in different places."""
    found: dict[int, list[Any]] = {}
    for choice in (choice for event in data for choice in json.loads(event)["choices"]):
        text, ids, logprobs, ends = found.setdefault(choice["index"], ["", [], [], []])
        text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        ids += choice.get("token_ids", ())
        told = choice["logprobs"] or {}
        logprobs += [entry["token"] for entry in told["content"]] if "content" in told else told.get("tokens", ())
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
        found[choice["index"]][0] = text
    return found


class Taken:
    """Counts how often a handler was woken for news."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        take = Collector.take

        async def counted(collector: Collector, *args: Any) -> Any:
            updates = await take(collector, *args)
            self.count += 1
            return updates

        monkeypatch.setattr(Collector, "take", counted)


def test_a_token_of_a_running_stream_wakes_no_handler(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Taken(monkeypatch)
    assert len(chunks(served, max_tokens=100, n=2)) >= 200
    assert taken.count < 20


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "body", [{}, {"stop": "wo"}, {"stop": ["lo w", "d!"], "n": 2}, {"logprobs": 1}, {"return_token_ids": True, "n": 3}]
)
def test_a_stream_reads_the_same_written_through_or_by_the_handler(
    served: Served, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], chat: bool
) -> None:
    if chat:
        if "logprobs" in body:
            body = {"logprobs": True, "top_logprobs": 1}
        body = {**body, "messages": [{"role": "user", "content": "x"}]}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    taken = Taken(monkeypatch)

    def read() -> tuple[dict[int, list[Any]], int]:
        before = taken.count
        served.say("hello world, h\u00e9llo \U0001f44d world!")
        data = events(served, path, **body)
        assert data[-1] == "[DONE]"
        return joined(data[:-1]), taken.count - before

    through, num_through = read()
    monkeypatch.setattr(exchange, "WRITE", "no such extension")
    handled, num_handled = read()
    assert through == handled
    assert num_through < num_handled


def test_a_fault_in_what_is_written_through_ends_that_stream_and_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Choice.feed

    def failing(choice: Choice, update: Any) -> Chunk | None:
        if choice.num_tokens == 20:
            raise ZeroDivisionError
        return feed(choice, update)

    monkeypatch.setattr(Choice, "feed", failing)
    data = events(served, max_tokens=100)
    assert "the server failed" in data[-1]
    assert "[DONE]" not in data
    assert served.complete(max_tokens=5).status_code == 200
