"""Sections C and M: cancellation and the gauges after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cases.rig import Server, open_request, wait_for

Prompts = Callable[[int], list[int]]


ABORTS = "vllm:request_success_total{abort}"
LONG = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_c01_a_disconnect_while_decoding_frees_the_blocks(
    server: Server, prompts: Prompts, n: int, stream: bool
) -> None:
    before = server.settled()
    sock = open_request(server, {"prompt": prompts(40), "max_tokens": 2000, "n": n, "stream": stream, **LONG})
    wait_for(lambda: server.metrics()["vllm:num_requests_running"] == n, 60, lambda: "it does not run")
    wait_for(lambda: server.grown(before, "vllm:generation_tokens_total") > 0, 60, lambda: "it does not decode")
    sock.close()
    server.check_idle()
    assert server.grown(before, ABORTS) == 1
    assert server.grown(before, "vllm:generation_tokens_total") < n * 2000


@pytest.mark.on("chunked")
def test_c01_a_disconnect_in_the_middle_of_a_prefill(server: Server, prompts: Prompts) -> None:
    """Eight of 25 chunks each, one after the other in the pool: however late the scrape, some are cut short."""
    before = server.settled()
    socks = [open_request(server, {"prompt": prompts(770), "max_tokens": 10, **LONG}) for _ in range(8)]
    chunks = "steelyard:prefill_chunks_total"
    wait_for(lambda: server.metrics()[chunks] > before[chunks], 60, lambda: "no chunk")
    for sock in socks:
        sock.close()
    server.check_idle()
    assert server.grown(before, ABORTS) > 0
    assert server.grown(before, chunks) < 8 * 25


@pytest.mark.on("narrow")
def test_c01_a_disconnect_in_the_queue(server: Server, prompts: Prompts) -> None:
    socks = [open_request(server, {"prompt": prompts(20), "max_tokens": 1500, **LONG}) for _ in range(2)]
    wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 2, 60, lambda: "the slots are not taken")
    before = server.settled()
    queued = open_request(server, {"prompt": prompts(20), "max_tokens": 10, **LONG})
    wait_for(lambda: server.metrics()["vllm:num_requests_waiting"] == 1, 60, lambda: "it does not wait")
    queued.close()
    wait_for(lambda: server.metrics()["vllm:num_requests_waiting"] == 0, 60, lambda: "it still waits")
    assert server.metrics()["vllm:num_requests_running"] == 2
    assert server.grown(before, ABORTS) == 1
    for sock in socks:
        sock.close()


def test_m01_every_accepted_request_is_counted_once_by_how_it_ended(server: Server, prompts: Prompts) -> None:
    before = server.settled()
    body = {"temperature": 0, "ignore_eos": True}
    socks = [open_request(server, {"prompt": prompts(20), "max_tokens": 1500, **body}) for _ in range(5)]
    server.together([{"prompt": prompts(20), "max_tokens": 5} for _ in range(5)])
    for sock in socks:
        sock.close()
    server.check_idle()
    reasons = ("stop", "length", "abort", "deadline", "error")
    grown = {reason: server.grown(before, f"vllm:request_success_total{{{reason}}}") for reason in reasons}
    assert grown == {"stop": 0, "length": 5, "abort": 5, "deadline": 0, "error": 0}


def test_m03_gauges_fall_back_when_all_leave_at_once(server: Server, prompts: Prompts) -> None:
    body = {"max_tokens": 1500, "stream": True, **LONG}
    socks = [open_request(server, {"prompt": prompts(30), **body}) for _ in range(20)]
    wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 8, 60, lambda: "they do not run")
    before = server.settled()
    for sock in socks:
        sock.close()
    server.check_idle()
    state = server.metrics()
    assert state["vllm:kv_cache_usage_perc"] == 0
    assert state[ABORTS] - before[ABORTS] == 20
