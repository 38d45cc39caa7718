"""Cases about who asks and for how long: tenants and their caches, priorities, deadlines."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from steelyard.server.tenants import hash_key
from tests.cases.configurations import CONFIGURATIONS
from tests.cases.rig import Answer, Server, open_request, same_as_solo, wait_for
from tests.server.test_side_channel import NUM_PAIRS, auc, half_width

Prompts = Callable[[int], list[int]]
Solo = Callable[..., Answer]
LONG = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two tenants, `a` and `b`; what the rig itself asks is an operator's."""
    path = tmp_path_factory.mktemp("keys") / "tenants.toml"
    path.write_text("".join(f'[[tenant]]\nname = "{n}"\nkeys = ["{hash_key("sk-" + n)}"]\n' for n in "ab"))
    yield start(*CONFIGURATIONS["plain"], "--tenants", str(path), "--api-key", "sk-operator", key="sk-operator")


def cached(server: Server, tenant: str, prompt: list[int], **body: Any) -> int:
    headers = {"authorization": f"Bearer sk-{tenant}"}
    response = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **body}, headers=headers)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_k13_a_tenant_never_hits_what_another_has_cached(shared: Server, prompts: Prompts) -> None:
    prompt = prompts(512)
    assert cached(shared, "a", prompt) == 0
    assert cached(shared, "b", prompt) == 0
    assert cached(shared, "a", prompt) == 496
    assert cached(shared, "b", prompt) == 496
    salted = prompts(512)
    assert cached(shared, "a", salted, cache_salt="s") == 0
    assert cached(shared, "b", salted, cache_salt="s") == 0
    assert cached(shared, "a", salted) == 0
    assert cached(shared, "a", salted, cache_salt="s") == 496
    assert shared.http.post("/reset_prefix_cache?tenant=a").status_code == 200
    assert cached(shared, "a", prompt) == cached(shared, "a", salted, cache_salt="s") == 0
    assert cached(shared, "b", prompt) == 496
    shared.check_idle()
    shared.check_canary()


@pytest.mark.slow
def test_k13_the_first_tokens_time_tells_nothing_across_tenants_on_a_real_clock(
    shared: Server, prompts: Prompts
) -> None:
    """As tests/server/test_side_channel.py has it on a virtual one; the figures are printed."""
    rng = random.Random(4)

    def first_token_s(tenant: str, prompt: list[int]) -> float:
        began = time.monotonic()
        cached(shared, tenant, prompt)
        return time.monotonic() - began

    def measured(observer: str) -> float:
        known: list[float] = []
        fresh: list[float] = []
        for _ in range(NUM_PAIRS):
            secret, other = prompts(1536), prompts(1536)
            first_token_s("a", secret)
            probes = [(known, secret), (fresh, other)]
            rng.shuffle(probes)
            for times, prompt in probes:
                times.append(first_token_s(observer, prompt))
        return auc(known, fresh)

    across, within = measured("b"), measured("a")
    print(f"AUC over {NUM_PAIRS} pairs, real clock: across tenants {across:.3f}, within one {within:.3f}")
    assert abs(across - 0.5) <= half_width(NUM_PAIRS)
    assert within >= 0.95


@pytest.mark.on("priority")
def test_s05_urgent_requests_displace_others_and_all_end_as_alone(server: Server, prompts: Prompts, solo: Solo) -> None:
    before = server.settled()
    ended: list[str] = []

    def one(kind: str, body: dict[str, Any]) -> Answer:
        answer = server.complete(**body)
        ended.append(kind)
        return answer

    bodies = [("normal", {"prompt": prompts(64), "max_tokens": 64, "priority": 5}) for _ in range(20)]
    urgent = [("urgent", {"prompt": prompts(64), "max_tokens": 64, "priority": 0}) for _ in range(5)]
    answers: dict[int, Answer] = {}
    threads = []
    decoded = "vllm:generation_tokens_total"
    for i, (kind, body) in enumerate(bodies + urgent):
        if i == len(bodies):
            wait_for(lambda: server.metrics()[decoded] > before[decoded], 60, lambda: "the first do not run")
        call = threading.Thread(target=lambda i=i, k=kind, b=body: answers.update({i: one(k, b)}))  # type: ignore[misc]
        threads.append(call)
        call.start()
    for call in threads:
        call.join()
    assert server.grown(before, "vllm:num_preemptions_total") > 0
    last_urgent = max(i for i, kind in enumerate(ended) if kind == "urgent")
    assert ended[last_urgent:].count("normal") >= 10
    for i, (_, body) in enumerate(bodies + urgent):
        same_as_solo(answers[i], solo(body["prompt"], max_tokens=64))


@pytest.mark.on("narrow")
@pytest.mark.parametrize("stream", [False, True])
def test_a13_a_deadline_in_the_queue_is_never_computed(server: Server, prompts: Prompts, stream: bool) -> None:
    socks = [open_request(server, {"prompt": prompts(20), "max_tokens": 1500, **LONG}) for _ in range(2)]
    wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 2, 60, lambda: "the slots are not taken")
    before = server.settled()
    body = {"prompt": prompts(20), "max_tokens": 1000, "deadline_ms": 50, "stream": stream}
    late = server.post("/v1/completions", body)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert server.grown(before, "vllm:prompt_tokens_total") == 0
    assert server.grown(before, "vllm:request_success_total{deadline}") == 1
    for sock in socks:
        sock.close()


def test_a13_a_deadline_while_it_runs_gives_the_tokens_so_far(server: Server, prompts: Prompts) -> None:
    answer = server.complete(prompts(20), max_tokens=2000, deadline_ms=400)
    assert answer.finish_reason == "deadline"
    assert 0 < len(answer.ids) < 2000
    early = server.complete(prompts(20), max_tokens=5, ttft_deadline_ms=60_000)
    assert len(early.ids) == 5
