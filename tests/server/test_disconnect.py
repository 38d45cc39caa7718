"""A client that leaves stops its work in every state, streaming or not; the ledger of every outcome sums up."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.errors import EngineDead
from steelyard.server.client import EngineClient
from steelyard.server.metrics import Metrics
from tests.server.served import Served, counter, post_raw, wait_for


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_before", [0, 3])
def test_disconnect_stops_all_choices(served: Served, stream: bool, num_before: int) -> None:
    served.engine.reply = lambda submit, index: [40] * 200
    served.engine.pause_at = num_before
    aborted = counter(served, "vllm:request_success_total", finished_reason="abort")
    body = {"prompt": ["x", "y"], "n": 3, "max_tokens": 200, "stream": stream}
    sock = post_raw(served, "/v1/completions", body)
    wait_for(lambda: len(served.engine.tasks) == 6, "six choices run")
    sock.close()
    wait_for(lambda: len(served.engine.stops) == 2, "both prompts are stopped")
    assert {(s.index, s.reason) for s in served.engine.stops} == {(-1, "disconnect")}
    wait_for(lambda: not served.engine.tasks and not served.service.num_in_flight, "nothing runs")
    assert counter(served, "vllm:request_success_total", finished_reason="abort") == aborted + 1


def test_disconnect_while_the_engine_has_not_answered(served: Served) -> None:
    """Between Submit and Accepted: the request is stopped, and a late Accepted is nobody's."""
    accept = served.engine._accept
    served.engine._accept = lambda submit: None  # type: ignore[method-assign]
    try:
        sock = post_raw(served, "/v1/completions", {"prompt": "x"})
        wait_for(lambda: len(served.engine.submits) == 1, "submitted")
        sock.close()
        wait_for(lambda: len(served.engine.stops) == 1, "stopped")
        served.run(accept, served.engine.submits[0])
    finally:
        del served.engine._accept
    assert served.complete(max_tokens=2).status_code == 200


def test_disconnect_in_the_middle_of_a_body_leaves_nothing(served: Served) -> None:
    sock = socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    wait_for(lambda: served.service.num_in_flight == 1, "the request has begun")
    sock.close()
    wait_for(lambda: served.service.num_in_flight == 0, "it is forgotten")
    assert not served.engine.submits


def test_a_reader_that_stops_holds_up_nobody_and_finds_its_text_joined(served: Served) -> None:
    served.engine.reply = lambda submit, index: [40] * 250
    sock = post_raw(served, "/v1/completions", {"prompt": "x", "max_tokens": 250, "stream": True})
    wait_for(lambda: bool(served.engine.submits) and not served.engine.tasks, "the engine has made all of it")
    assert served.complete(max_tokens=2).status_code == 200
    sock.settimeout(60)
    data = b""
    while b"[DONE]" not in data:
        data += sock.recv(65536)
    sock.close()
    assert data.count(b'"finish_reason":"length"') == 1


def test_a_handler_that_ends_after_the_channel_was_closed_has_nobody_to_tell() -> None:
    def closed(message: object) -> None:
        raise EngineDead("the channel to the engine is closed")

    client = EngineClient(closed, lambda: 0, 20.0, Metrics())
    collector: Any = SimpleNamespace(ids=["a"])
    client._open["a"] = (collector, 0)  # type: ignore[assignment]
    client.close(collector)
    assert collector.ids == []
