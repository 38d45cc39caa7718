"""Structured output on a real server with a model of random weights: whatever it samples, the output conforms."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cases.rig import Server, open_request

Prompts = Callable[[int], list[int]]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["sea", "ship"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "one two"}]


def test_every_kind_of_structure_holds_beside_free_requests(server: Server, prompts: Prompts) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    chats: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        {"structured_outputs": {"regex": "(sea|ship){2,5}x"}},
        {"structured_outputs": {"choice": ["yes", "no"]}, "n": 3},
        {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
    ]
    with ThreadPoolExecutor(16) as pool:
        asked = [
            pool.submit(server.post, "/v1/chat/completions", {"messages": USER, "seed": i, "max_tokens": 400, **body})
            for i in range(2)
            for body in chats
        ]
        free = pool.submit(server.together, [{"prompt": prompts(20), "max_tokens": 40} for _ in range(4)])
        answers = [one.result() for one in asked]
        assert all(len(answer.ids) == 40 for answer in free.result())
    for body, response in zip(chats * 2, answers):
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            check(body, choice)


def check(body: dict[str, Any], choice: dict[str, Any]) -> None:
    message = choice["message"]
    if "tools" in body:
        assert choice["finish_reason"] == "tool_calls"
        assert set(json.loads(message["tool_calls"][0]["function"]["arguments"])) == {"name", "size"}
        return
    assert choice["finish_reason"] == "stop"
    if "response_format" in body:
        assert set(json.loads(message["content"])) == {"name", "size"}
    elif "regex" in body["structured_outputs"]:
        assert re.fullmatch("(sea|ship){2,5}x", message["content"])
    else:
        assert message["content"] in ("yes", "no")


@pytest.mark.slow
def test_a_thousand_idle_connections_hold_up_nobody(server: Server) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1000)]
    for sock in idle[::2]:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    server.check_canary()
    for sock in idle:
        sock.close()
    server.check_canary()


def test_a_catastrophic_regex_is_refused_or_served_and_holds_up_nobody(server: Server, prompts: Prompts) -> None:
    """What explodes in a backtracking matcher, and what explodes in an automaton; others are served beside it."""
    ask = {"prompt": prompts(5), "max_tokens": 4}
    for regex in ("(a+)+$", "(a|a)*b", "(.*a){25}", "(x+x+)+y", "(a?){200}a{200}", "[ab]*a[ab]{1000}"):
        held = open_request(server, {**ask, "structured_outputs": {"regex": regex}})
        assert server.post("/v1/completions", ask).status_code == 200
        held.settimeout(60)
        assert held.recv(100).split(b" ")[1] in (b"200", b"400")
        held.close()
