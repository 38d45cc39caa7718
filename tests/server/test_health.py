"""/health says whether a token can be made, /metrics parses and has the documented names, admission keeps limits."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from steelyard.core.timed import State, Timed
from steelyard.errors import ContextLengthExceeded, Overloaded
from steelyard.server.admission import Admission
from steelyard.server.client import EngineClient
from steelyard.server.ledger import merged_ns
from steelyard.server.metrics import ENGINE_COUNTERS, ENGINE_GAUGES, Metrics
from steelyard.server.tenants import Tenant
from steelyard.wire.messages import Pulse
from tests.server import fake_engine
from tests.server.served import Served, counter, wait_for

DOCUMENTED = re.findall(r"^\| `([\w:]+)` \|", (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(), re.M)


def exposed(page: str) -> list[str]:
    """Names as a query has them: counters with their _total."""
    families = text_string_to_metric_families(page)
    return [family.name + ("_total" if family.type == "counter" else "") for family in families]


def test_metrics_page_is_well_formed_and_has_exactly_the_documented_names(served: Served) -> None:
    served.complete(max_tokens=3)
    response = served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(response.text))
    assert exposed(response.text) == DOCUMENTED
    for family in families:
        assert family.documentation
        assert all(sample.labels["model_name"] == "tiny" for sample in family.samples)
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        if family.type == "histogram":
            buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
            assert buckets == sorted(buckets)
            assert buckets[-1] == next(s.value for s in family.samples if s.name.endswith("_count"))


def test_a_fresh_page_has_the_same_names_as_a_used_one() -> None:
    page = Metrics().page("m", None, None, "starting")
    assert exposed(page) == DOCUMENTED


def test_label_values_are_escaped() -> None:
    page = Metrics().page('a"b\\c\nd', None, None, None)
    (family, *_) = text_string_to_metric_families(page)
    assert family.samples[0].labels["model_name"] == 'a"b\\c\nd'


def test_tokens_and_requests_are_counted_once(served: Served) -> None:
    def read() -> list[float]:
        return [
            counter(served, "vllm:time_to_first_token_seconds_count"),
            counter(served, "vllm:inter_token_latency_seconds_count"),
            counter(served, "vllm:request_success_total", finished_reason="length"),
            counter(served, "vllm:request_generation_tokens_sum"),
            counter(served, "vllm:e2e_request_latency_seconds_count"),
            counter(served, "vllm:request_params_n_count"),
        ]

    before = read()
    served.engine.per_step = 2
    served.complete(max_tokens=5, n=2)
    served.complete(max_tokens=1)
    assert [b - a for a, b in zip(before, read())] == [2, 2 * 3, 2, 11, 2, 2]


def test_engine_counters_are_exposed_under_their_names(served: Served) -> None:
    counters = {key: i + 7 for i, key in enumerate(ENGINE_COUNTERS)}
    served.run(served.engine.say, fake_engine.idle(counters=counters, steps=99, running=4, blocks_active=8))
    for key, (name, _) in ENGINE_COUNTERS.items():
        shown = counters[key] / 1e9 if key.endswith("_ns") else counters[key]
        assert counter(served, name) == (99 if key == "steps" else shown)
    assert counter(served, "vllm:num_requests_running") == 4
    assert counter(served, "vllm:kv_cache_usage_perc") == 8 / fake_engine.NUM_BLOCKS
    gauges = {key: i + 3 for i, key in enumerate(ENGINE_GAUGES)}
    served.run(served.engine.say, fake_engine.idle(gauges=gauges))
    assert {key: counter(served, name) for key, (name, _) in ENGINE_GAUGES.items()} == gauges


def test_health_follows_progress_and_costs_no_token(served: Served) -> None:
    assert served.http.get("/health").json() == {"status": "ok"}
    stalled = fake_engine.idle(stalled_ns=21_000_000_000, waiting=3, busy=True, detail="no blocks are handed out")
    served.run(served.engine.say, stalled)
    response = served.http.get("/health")
    assert response.status_code == 503
    assert response.json()["reason"] == "no step made progress for 21.0 s: no blocks are handed out"
    assert counter(served, "steelyard:engine_ready") == 0
    assert served.http.get("/live").status_code == 200
    served.run(served.engine.say, fake_engine.idle())
    assert served.http.get("/health").status_code == 200
    assert not served.engine.received


def test_a_long_step_is_told_apart_from_silence_and_has_a_limit_of_its_own(served: Served) -> None:
    """On a clock of the test's: a pulse a second within a step of six minutes, then none."""
    now_ns = [10**18]
    client = EngineClient(lambda message: None, lambda: now_ns[0], 20.0, Metrics(), 300.0)
    client.on_messages([fake_engine.ready(320), fake_engine.idle(busy=True)])
    for second in range(1, 301):
        now_ns[0] += 10**9
        client.on_messages([Pulse(second * 10**9)])
        assert client.unhealthy() is None
    client.on_messages([Pulse(301 * 10**9)])
    assert client.unhealthy() == "one step has run for 301.0 s"
    client.on_messages([fake_engine.idle(busy=True)])
    assert client.unhealthy() is None
    now_ns[0] += 21 * 10**9
    assert client.unhealthy() == "the engine has said nothing for 21.0 s"


def test_draining_refuses_what_is_new_and_finishes_what_runs(served: Served) -> None:
    served.engine.stalled = True
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(served.complete(max_tokens=5).status_code))
    thread.start()
    wait_for(lambda: bool(served.engine.tasks), "one runs")
    served.service.draining = True
    try:
        refused = served.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert served.http.get("/health").status_code == 503
        assert served.http.get("/live").status_code == 200
    finally:
        served.engine.stalled = False
        thread.join()
        served.service.draining = False
    assert answers == [200]


def test_the_death_of_the_engine_reaches_every_request(bare: Served) -> None:
    bare.engine.reply = lambda submit, index: [40] * 100
    stream = bare.http.stream("POST", "/v1/completions", json={"prompt": [5], "stream": True, "max_tokens": 100})
    bare.engine.pause_at = 3
    with stream as response:
        lines = response.iter_lines()
        next(lines)
        bare.run(bare.service.client.died, "the engine was killed by signal 9")
        rest = [line for line in lines if line]
    assert "[DONE]" not in "".join(rest)
    assert "signal 9" in rest[-1]
    response = bare.complete(prompt=[5])
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "signal 9" in bare.http.get("/health").json()["reason"]
    assert counter(bare, "vllm:request_success_total", finished_reason="error") == 1
    for task in bare.engine.tasks.values():
        task.cancel()


def test_queue_limits_refuse_with_the_numbers_and_count(served: Served) -> None:
    served.service.admission._max_tokens = 50
    served.engine.stalled = True
    rejected = served.service.metrics.rejections.values.get(("overloaded",), 0)
    first = threading.Thread(target=lambda: served.complete(prompt=[5] * 30, max_tokens=1))
    first.start()
    try:
        wait_for(lambda: bool(served.engine.tasks), "the first waits")
        second = served.complete(prompt=[5] * 30, max_tokens=1)
        assert second.status_code == 503
        message = second.json()["error"]["message"]
        assert "30 prompt tokens wait" in message
        assert "the limit is 50" in message
        assert int(second.headers["retry-after"]) >= 1
        assert served.service.metrics.rejections.values[("overloaded",)] == rejected + 1
    finally:
        served.engine.stalled = False
        first.join()
        served.service.admission._max_tokens = None
    assert served.complete(prompt=[5] * 60, max_tokens=1).status_code == 200


def test_a_place_is_given_back_once() -> None:
    admission, tenant = Admission(1, 10, lambda: 0), Tenant("t")
    with admission.reserve(tenant) as place:
        with pytest.raises(Overloaded):
            admission.reserve(tenant)
        place.add_tokens(10)
        place.release(served=True)
        with admission.reserve(tenant) as other, pytest.raises(ContextLengthExceeded, match="at most 10 may wait"):
            other.add_tokens(11)
    load = admission.load_of(tenant)
    assert (admission.num_requests, admission.num_tokens, load.num_requests, load.num_tokens) == (0, 0, 0, 0)


def test_the_merged_ledger_sums_to_the_wall_time() -> None:
    timed = Timed(State.HTTP_READ, 0)
    for state, now in ((State.TOKENIZE, 10), (State.IN_ENGINE, 30), (State.STREAM, 130), (State.ENDED, 140)):
        timed.to(state, now)
    merged = merged_ns(timed, {"prefill": 60, "wait_kv": 30})
    assert merged == {"http_read": 10, "tokenize": 20, "stream": 10, "prefill": 60, "wait_kv": 30, "wire": 10}
    assert sum(merged.values()) == timed.total_ns
    assert sum(merged_ns(timed, {"prefill": 101}).values()) == timed.total_ns


def test_every_request_adds_its_whole_time_to_the_accounts(served: Served) -> None:
    counters = served.service.metrics.request_ns.values
    before = dict(counters)
    served.complete(max_tokens=5)
    wait_for(lambda: served.service.num_in_flight == 0, "it has ended")
    grown = {labels[0] for labels, value in counters.items() if value > before.get(labels, 0)}
    assert grown >= {"http_read", "tokenize", "wire", "prefill"}
