"""Each HTTP request's account: sums to its wall time for every outcome, is out by every door, and is its tenant's."""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from steelyard.core.timed import State
from steelyard.scheduler.protocols import Faults
from steelyard.server.ledger import SLOW_WRITE_NS, Account, LedgerLog, Ledgers, slowest_gap_ns
from steelyard.server.tenants import Tenant, Tenants
from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer
from tests import tiny_model
from tests.server.real_engine import RealEngine, serve
from tests.server.served import Served, chunks, post_raw, wait_for


class FailFirst(Faults):
    """A prompt of 13 tokens fails at its first token."""

    def before_first_token(self, request: Any) -> str | None:
        return "it is said to fail" if request.prompt_len == 13 else None


TENANTS = Tenants(
    [
        Tenant(name, (hashlib.sha256(name.encode()).digest(),), operator=name == "boss")
        for name in ("boss", "acme", "other")
    ],
    b"k" * 32,
)


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger") / "ledger.jsonl"


@pytest.fixture(scope="module")
def real(tokenizer: Tokenizer, log_path: Path) -> Iterator[Served]:
    template = ChatTemplate(tiny_model.TEMPLATE, tiny_model.BOS, tiny_model.IM_END)
    yield from serve(tokenizer, template, RealEngine(faults=FailFirst(), num_blocks=(24,)), ledger_log=str(log_path))


def last(served: Served, **expected: Any) -> dict[str, Any]:
    """The last record, whole, once the server has let go of all."""
    wait_for(lambda: served.service.num_in_flight == 0 and not served.engine.engine.has_work, "all is over")
    record = served.http.get("/ledger/requests?last=1").json()["requests"][0]
    whole: dict[str, Any] = served.http.get(f"/ledger/requests/{record['id']}").json()
    check(whole)
    assert {name: whole[name] for name in expected} == expected
    return whole


def check(record: dict[str, Any]) -> None:
    """The sums that hold for every request."""
    assert sum(record["buckets_ns"].values()) == record["total_ns"]
    assert State.IN_ENGINE.value not in record["buckets_ns"]
    for choice, times in zip(record["choices"], record["deliveries"]):
        assert sum(choice["buckets_ns"].values()) == choice["total_ns"]
        engine = choice["engine"]
        assert sum(engine["buckets_ns"].values()) == engine["total_ns"] >= choice["total_ns"]
        for name, amount in choice["buckets_ns"].items():
            assert engine["buckets_ns"][name] >= amount
        assert sum(count for _, count in times) >= choice["usage"]["completion_tokens"]
        gaps = [b - a for (a, _), (b, _) in zip([[0, 0], *times], times)]
        assert sum(gaps) == (times[-1][0] if times else 0) <= record["total_ns"]


def test_the_ledger_in_a_response_sums_to_its_time_and_the_final_one_is_longer(real: Served) -> None:
    began = time.monotonic_ns()
    answer = real.complete(prompt=[5] * 20, max_tokens=6, return_ledger=True, n=2).json()
    wall_ns = time.monotonic_ns() - began
    ledger = answer["ledger"]
    assert sum(ledger["buckets_ns"].values()) == ledger["total_ns"] <= wall_ns
    assert all(isinstance(value, int) for value in ledger["buckets_ns"].values())
    assert len(ledger["choices"]) == 2 and ledger["cost_ns"] == sum(c["cost_ns"] for c in ledger["choices"]) > 0
    record = last(real, id=answer["id"], status=200, outcome="length")
    assert ledger["total_ns"] <= record["total_ns"] <= wall_ns
    tokens = record["tokens"]
    assert tokens["prompt"] == 20 and tokens["generated"] == 12
    for choice in record["choices"]:
        usage = choice["usage"]
        come_by = usage["cached_tokens"] + usage["shared_tokens"]
        assert usage["computed_tokens"] == 20 - come_by + 6 - 1 + usage["recomputed_tokens"]
    assert record["choices"][1]["usage"]["shared_tokens"] == 19


def test_a_stream_ends_with_its_ledger(real: Served) -> None:
    parts = chunks(real, prompt=[6] * 9, max_tokens=5, return_ledger=True, stream_options={"include_usage": True})
    assert parts[-1]["choices"] == [] and "usage" in parts[-2]
    ledger = parts[-1]["ledger"]
    assert sum(ledger["buckets_ns"].values()) == ledger["total_ns"]
    assert "ledger" not in json.dumps(parts[:-1])
    last(real, id=parts[0]["id"])
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "return_ledger": True}
    for stream in (False, True):
        text = real.post("/v1/chat/completions", {**chat, "stream": stream}).text
        assert text.count('"ledger"') == 1
        last(real, endpoint="/v1/chat/completions")
    assert "ledger" not in real.complete(max_tokens=2).json()


def test_refused_failed_and_stopped_requests_close_too(real: Served) -> None:
    assert real.complete(prompt=[5] * 300, max_tokens=6).status_code == 400
    last(real, status=400, outcome="refused", error="context_length_exceeded")
    assert real.complete(prompt=[5] * 13, max_tokens=6).status_code == 500
    last(real, status=500, outcome="error")
    assert real.complete(max_tokens=0).status_code == 400
    assert last(real, status=400)["choices"] == []
    text = real.complete(prompt=[5], max_tokens=9).json()["choices"][0]["text"]
    assert real.complete(prompt=[5], max_tokens=9, stop=[text[1]]).status_code == 200
    record = last(real, outcome="stop")
    assert record["tokens"]["overshoot"] + record["tokens"]["generated"] >= 2


def test_a_request_whose_client_left_is_closed_when_the_engine_lets_go(real: Served) -> None:
    real.engine.delay = lambda plan: time.sleep(0.003)
    sock = post_raw(real, "/v1/completions", {"prompt": [9] * 5, "max_tokens": 200, "stream": True})
    wait_for(lambda: real.engine.engine.has_work, "it runs")
    time.sleep(0.02)
    sock.close()
    real_record = last(real, outcome="abort")
    real.engine.delay = lambda plan: None
    assert real_record["choices"][0]["reason"] == "abort"
    assert real_record["buckets_ns"]["decode"] > real_record["buckets_ns"]["wire"]


def test_preempted_requests_close_and_say_so(real: Served) -> None:
    """Four prompts that are taken in together, on an engine that has kept nothing free for outputs yet."""
    real.engine.engine.scheduler._joiner._reserve.share = 0.0
    assert real.complete(prompt=[[7 + i] * 40 for i in range(4)], max_tokens=150).status_code == 200
    record = last(real)
    assert record["tokens"]["preemptions"] > 0
    assert any("preempted" in choice["buckets_ns"] for choice in record["choices"])
    check(record)


def test_steps_memory_and_little_are_exact_over_http(real: Served) -> None:
    real.complete(prompt=[5] * 20, max_tokens=6)
    steps = real.http.get("/ledger/steps?last=50").json()["steps"]
    assert len(steps) > 6
    for before, after in itertools.pairwise(steps):
        assert after["span_ns"] == after["commit_ns"] - before["commit_ns"]
        assert after["device_ns"] + sum(after["gaps_ns"].values()) == after["span_ns"]
    whole = real.http.get(f"/ledger/steps/{steps[-1]['id']}").json()
    assert sum(share["cost_ns"] for share in whole["shares"]) + whole["engine_ns"] == whole["device_ns"]
    little = real.http.get("/ledger/little").json()
    assert all(state["difference_ns"] == 0 for state in little["states"].values())
    [pool] = real.http.get("/ledger/memory").json()["pools"]
    assert pool["clean"] + pool["cached"] + pool["active"] == pool["num_blocks"] == 24
    live = real.http.get("/ledger/live").json()
    assert len(live["blocks"]["cells"]) == 24 and live["operator"] and live["steps"] and live["recent"]


def test_prompts_are_told_as_hashes_that_are_alike_where_tokens_are(real: Served) -> None:
    for prompt in ([5, 6, 7, 8] * 6, [5, 6, 7, 9] * 6):
        real.complete(prompt=prompt, max_tokens=2)
    *_, first, second = real.http.get("/ledger/prompts?last=8").json()["prompts"]
    a, b = first["token_hashes"], second["token_hashes"]
    assert len(a) == len(b) == first["prompt_tokens"] == 24
    assert [x == y for x, y in zip(a, b)] == [True, True, True, False] * 6
    assert not {5, 6, 7, 8, 9} & {*a, *b} and len({*a, *b}) == 5


def test_what_is_not_there_or_not_a_number_is_said(real: Served) -> None:
    assert real.http.get("/ledger/requests/nothing").status_code == 404
    assert real.http.get("/ledger/steps/999999").status_code == 404
    for bad in ("0", "-1", "x", "99999", "٣"):
        assert real.http.get(f"/ledger/steps?last={bad}").status_code == 400
    assert real.http.get("/ledger/requests?slowest=1&last=3").json()["requests"]


def test_the_log_has_each_request_once(real: Served, log_path: Path) -> None:
    answer = real.complete(prompt=[5] * 20, max_tokens=3).json()
    last(real, id=answer["id"])
    wait_for(lambda: answer["id"] in log_path.read_text(), "it is written")
    lines = [json.loads(line) for line in log_path.read_text().splitlines()]
    assert sum(line["id"] == answer["id"] for line in lines) == 1
    for line in lines:
        assert sum(line["buckets_ns"].values()) == line["total_ns"]
    LedgerLog(log_path, lambda: None).close()
    with pytest.raises(Exception, match="--ledger-log"):
        Ledgers(str(log_path / "no"))


@pytest.fixture
def shared(tokenizer: Tokenizer) -> Iterator[Served]:
    """A server of three tenants."""
    yield from serve(tokenizer, None, RealEngine(), tenants=TENANTS)


def test_a_tenant_sees_its_own_and_hears_of_others_without_counts(shared: Served) -> None:
    served, engine = shared, shared.engine
    as_ = {name: {"authorization": f"Bearer {name}"} for name in ("boss", "acme", "other")}
    ids = {}
    for name in ("acme", "other"):
        body = {"prompt": [5] * 20, "max_tokens": 4}
        ids[name] = served.http.post("/v1/completions", json=body, headers=as_[name]).json()["id"]
    wait_for(lambda: served.service.num_in_flight == 0 and not engine.engine.has_work, "all is over")

    def get(path: str, name: str) -> httpx.Response:
        return served.http.get(path, headers=as_[name])

    listed = {n: [r["tenant"] for r in get("/ledger/requests", n).json()["requests"]] for n in as_}
    assert listed == {"boss": ["acme", "other"], "acme": ["acme"], "other": ["other"]}
    assert get(f"/ledger/requests/{ids['acme']}", "other").status_code == 404
    mine = get(f"/ledger/requests/{ids['acme']}", "acme").json()
    check(mine)
    [choice] = mine["choices"]
    for step in choice["engine"]["slowest_steps"]:
        assert set(step["causes"]) == {"own_ns", "padding_ns", "overhead_ns", "residual_ns", "others_ns"}
        assert "rows" not in step and "tokens" not in step
        assert sum(step["causes"].values()) == step["device_ns"]
    for path in ("steps", "steps/1", "memory", "little"):
        assert get(f"/ledger/{path}", "acme").status_code == 403
        assert get(f"/ledger/{path}", "boss").status_code == 200
    live = get("/ledger/live", "acme").json()
    assert not {"status", "blocks", "steps", "accounts_s"} & set(live)
    assert {r["tenant"] for r in live["recent"]} == {"acme"}
    assert served.http.get("/ledger/live").status_code == 401


def test_a_slow_reader_moves_its_own_bucket_and_no_other() -> None:
    def tail(slow_ns: int) -> dict[State, int]:
        account = Account("r", "/v1/completions", "t", 0, 0.0)
        account.timed.to(State.HTTP_READ, 0)
        account.timed.to(State.STREAM, 100)
        account.wrote(100, 150 + slow_ns)
        account.timed.to(State.ENDED, 200 + slow_ns)
        return account.timed.buckets_ns

    assert tail(0) == {State.HTTP_READ: 100, State.STREAM: 100}
    slow = SLOW_WRITE_NS + 7
    assert tail(slow) == {State.HTTP_READ: 100, State.CLIENT_SLOW: slow + 50, State.STREAM: 50}


def test_a_tenant_reads_its_own_counters_and_no_others(shared: Served) -> None:
    def page(name: str) -> str:
        return shared.http.get("/metrics", headers={"authorization": f"Bearer {name}"}).text

    for name in ("acme", "other"):
        body, headers = {"prompt": [5] * 20, "max_tokens": 4}, {"authorization": f"Bearer {name}"}
        assert shared.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    wait_for(lambda: len(shared.service.ledgers.last(9, None)) == 2, "all is over")
    samples = [s for family in text_string_to_metric_families(page("acme")) for s in family.samples]
    assert {s.labels["tenant"] for s in samples} == {"acme"} and {s.labels["model_name"] for s in samples} == {"tiny"}
    assert {s.name for s in samples} == {
        "steelyard:request_time_seconds_total",
        "steelyard:tenant_tokens_total",
        "steelyard:tenant_responses_total",
    }
    [record] = shared.service.ledgers.last(9, "acme")
    told = {s.labels["state"]: s.value for s in samples if "state" in s.labels}
    assert told == {state: amount_ns / 1e9 for state, amount_ns in record["buckets_ns"].items()}
    assert 'tenant="other"' in page("boss") and "vllm:num_requests_running" in page("boss")
    assert shared.http.get("/metrics").status_code == 401


def test_what_is_refused_before_any_route_has_an_account_too(shared: Served) -> None:
    body = {"prompt": [5] * 20, "max_tokens": 2}
    mine = {"authorization": "Bearer boss"}
    assert shared.http.post("/v1/completions", json=body, headers={"x-request-id": "who"}).status_code == 401
    with socket.create_connection(("127.0.0.1", shared.http.base_url.port or 0)) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: large\r\nContent-Length: {10**12}\r\n\r\n"
        sock.sendall(head.encode())
        assert b" 413 " in sock.recv(4096)
    assert shared.http.post("/v1/completions", json=body, headers={**mine, "x-request-id": "known"}).status_code == 200
    wait_for(lambda: shared.service.ledgers.get("known", "boss") is not None, "it is over")
    for id, status, code in (("who", 401, "invalid_api_key"), ("large", 413, "body_too_large"), ("known", 200, "")):
        record = shared.http.get(f"/ledger/requests/{id}", headers=mine).json()
        check(record)
        assert record["status"] == status and record["error"] == code and record["buckets_ns"]["auth"] > 0
        if status != 200:
            assert record["outcome"] == "refused" and set(record["buckets_ns"]) <= {"auth", "wire"}
            assert (
                shared.http.get(f"/ledger/requests/{id}", headers={"authorization": "Bearer acme"}).status_code == 404
            )


def test_strangers_push_nobody_out_and_take_nobodys_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.server.ledger.MAX_STRANGERS", 2)
    ledgers = Ledgers()
    for i, tenant in enumerate(["acme", *[""] * 5]):
        account = Account("same" if i < 2 else f"r{i}", "/", tenant, 0, 0.0)
        account.timed.to(State.ENDED, 10)
        ledgers.add(account.record())
    assert [r["id"] for r in ledgers.last(10, None)] == ["same", "r4", "r5"]
    found = ledgers.get("same", "acme")
    assert found is not None and found["tenant"] == "acme"
    assert ledgers.get("r3", None) is None and ledgers.get("r5", None) is not None
    assert ledgers.last(10, "") == []


def test_the_longest_gap_is_between_deliveries() -> None:
    account = Account("r", "/", "t", 0, 0.0)
    assert account.so_far(10)["slowest_gap_ns"] == 0

    assert slowest_gap_ns(array("q", [5, 1, 9, 2, 30, 1])) == 21


def test_only_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.server.ledger.MAX_KEPT", 3)
    ledgers = Ledgers()
    for i in range(5):
        account = Account(f"r{i}", "/", "t", 0, 0.0)
        account.timed.to(State.ENDED, 10 - i)
        ledgers.add(account.record())
    assert [r["id"] for r in ledgers.last(10, None)] == ["r2", "r3", "r4"]
    assert [r["id"] for r in ledgers.last(2, None, slowest=True)] == ["r2", "r3"]
    assert ledgers.get("r1", None) is None and ledgers.get("r4", None) is not None
    assert ledgers.get("r4", "somebody else") is None


def test_a_record_that_closes_behind_the_response_is_waited_for(real: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = real.complete(prompt=[7] * 5, max_tokens=2).json()
    ledgers, asked = real.service.ledgers, [0]
    get = ledgers.get

    def late(id: str, only: str | None) -> Any:
        asked[0] += 1
        return None if asked[0] == 1 else get(id, only)

    monkeypatch.setattr(ledgers, "get", late)
    assert real.http.get(f"/ledger/requests/{answer['id']}").json()["outcome"] == "length" and asked[0] == 2
