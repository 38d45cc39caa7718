"""What is true of every request: limits of a request's head, its id, keys, cross-origin rules, time to arrive."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from steelyard.server.connection import ABORT
from steelyard.server.edge import Edge
from steelyard.server.tenants import Tenant, Tenants, hash_key, load_tenants
from steelyard.text.tokenizer import Tokenizer
from steelyard.wire.messages import Control
from tests.server import fake_engine
from tests.server.served import Served, counter, post_raw, start, wait_for

KEYS = {"acme": "sk-acme", "beta": "sk-beta", "root": "sk-root"}


def tenants() -> Tenants:
    text = "".join(f'[[tenant]]\nname = "{n}"\nkeys = ["{hash_key(k)}"]\n{EXTRA[n]}\n' for n, k in KEYS.items())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tenants.toml"
        path.write_text(text)
        return load_tenants(path, [])


EXTRA = {
    "acme": "max_concurrent_requests = 2\nmax_in_flight_tokens = 100",
    "beta": "max_tokens_per_minute = 60\nweight = 2.5\nttft_slo_ms = 300",
    "root": "operator = true",
}


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Served]:
    """A server with tenants, and limits of its own on one request."""
    limits = {"max_input_tokens": 90, "max_output_tokens": 80, "max_total_tokens": 120}
    lenient = {"ignore_unknown_fields": True, "body_timeout_s": 0.3, "slow_client_timeout_s": 0.3}
    lenient["header_timeout_s"] = 0.5
    others = {"allowed_origins": ("https://page.example",), "ttft_slo_ms": 500.0, "tpot_slo_ms": 50.0}
    for url, engine, service in start(tokenizer, None, tenants(), **limits, **lenient, **others):
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Served(url, engine, service, tokenizer, http)


@pytest.fixture
def keyed(guarded: Served) -> Iterator[Served]:
    guarded.engine.reset()
    guarded.run(guarded.engine.say, fake_engine.idle())
    yield guarded
    wait_for(lambda: not guarded.engine.tasks and not guarded.service.num_in_flight, "nothing runs")
    for name in KEYS:
        load = guarded.service.admission.load_of(guarded.service.tenants.all[name])
        assert (load.num_requests, load.num_tokens) == (0, 0)


def as_tenant(served: Served, name: str, **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    return served.http.post("/v1/completions", json={"prompt": [5] * 20, "max_tokens": 3, **body}, headers=headers)


@pytest.mark.parametrize(
    "method, path",
    [
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("GET", "/metrics"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/nothing"),
    ],
)
@pytest.mark.parametrize("key", [None, "Bearer", "Bearer wrong", "Basic sk-acme", "sk-acme", "Bearer sk-acme x"])
def test_no_route_but_health_opens_without_a_known_key(keyed: Served, method: str, path: str, key: str | None) -> None:
    response = keyed.http.request(method, path, headers={} if key is None else {"authorization": key}, json={})
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert keyed.http.get("/health").status_code == 200
    assert keyed.http.get("/live").status_code == 200


def test_an_operators_routes_are_forbidden_to_a_tenant(keyed: Served) -> None:
    for name, status in (("acme", 403), ("root", 200)):
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        whole = "vllm:num_requests_running" in keyed.http.get("/metrics", headers=headers).text
        assert whole == (status == 200)
        assert keyed.http.post("/reset_prefix_cache?tenant=acme", headers=headers).status_code == status
    assert keyed.http.post("/reset_prefix_cache?tenant=x", headers=headers).status_code == 400
    dropped = [m for m in keyed.engine.received if getattr(m, "what", "") == "drop_cache"]
    assert [m.namespace for m in dropped] == [namespace(keyed, "acme")]  # type: ignore[union-attr]


def namespace(served: Served, name: str, salt: str | None = None) -> bytes:
    return served.service.tenants.namespace(served.service.tenants.all[name], salt)


def test_a_revoked_key_ends_at_once_and_its_cache_with_it(keyed: Served) -> None:
    before = keyed.service.tenants
    after = Tenants([tenant for name, tenant in before.all.items() if name != "acme"], before.server_key)
    forgotten = namespace(keyed, "acme")
    keyed.run(keyed.service.set_tenants, after)
    try:
        assert as_tenant(keyed, "acme").status_code == 401
        assert as_tenant(keyed, "root").status_code == 200
        dropped = [m.namespace for m in keyed.engine.received if isinstance(m, Control)]
        assert dropped == [forgotten]
    finally:
        keyed.service.tenants = before


def test_a_salt_narrows_a_tenants_namespace_and_reaches_no_others(keyed: Served) -> None:
    for name, salt in (("acme", None), ("acme", "s"), ("beta", None), ("beta", "s")):
        assert as_tenant(keyed, name, cache_salt=salt).status_code == 200
        keyed.service.admission.load_of(keyed.service.tenants.all["beta"]).level = 60
    submits = keyed.engine.submits
    assert len({s.namespace for s in submits}) == len({s.block_hashes[0] for s in submits}) == 4
    assert submits[1].namespace.startswith(submits[0].namespace)
    assert not submits[3].namespace.startswith(submits[0].namespace)
    assert [s.tenant for s in submits] == ["acme", "acme", "beta", "beta"]


def test_namespaces_are_unknown_without_the_servers_key() -> None:
    tenant = Tenant("acme", (b"x" * 32,))
    one, two = Tenants([tenant], b"1" * 32), Tenants([tenant], b"2" * 32)
    assert one.namespace(tenant) != two.namespace(tenant)
    assert Tenants([Tenant("default")], b"1" * 32).namespace(tenant) == b""


def test_a_tenants_own_limits_are_429_with_the_numbers_and_a_time(keyed: Served) -> None:
    keyed.engine.stalled = True
    socks = [held(keyed, "acme") for _ in range(2)]
    wait_for(lambda: len(keyed.engine.tasks) == 2, "both run")
    third = as_tenant(keyed, "acme")
    assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert third.json()["error"]["type"] == "rate_limit_error"
    assert "2 requests are being served, the limit is 2" in third.json()["error"]["message"]
    assert int(third.headers["retry-after"]) >= 1
    socks.pop().close()
    wait_for(lambda: len(keyed.engine.tasks) == 1, "one left")
    never = as_tenant(keyed, "acme", prompt=[5] * 40, max_tokens=70)
    assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")
    assert "are 110, but the limit of this tenant is 100 (max_in_flight_tokens)" in never.json()["error"]["message"]
    assert "retry-after" not in never.headers
    over = as_tenant(keyed, "acme", max_tokens=70)
    assert over.status_code == 429
    assert "the limit is 100, and this request has 90" in over.json()["error"]["message"]
    keyed.engine.stalled = False
    assert as_tenant(keyed, "root").status_code == 200
    socks.pop().close()
    wait_for(lambda: not keyed.engine.tasks, "none left")
    assert as_tenant(keyed, "acme", max_tokens=70).status_code == 200


def held(served: Served, name: str) -> socket.socket:
    raw = json.dumps({"prompt": [5] * 20, "max_tokens": 3}).encode()
    sock = socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[name]}\r\n"
    sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return sock


def test_a_rate_counts_prompts_and_outputs_and_says_when_it_is_open_again(keyed: Served) -> None:
    load = keyed.service.admission.load_of(keyed.service.tenants.all["beta"])
    load.level = 60.0
    assert as_tenant(keyed, "beta", prompt=[5] * 60, max_tokens=40).status_code == 200
    wait_for(lambda: load.num_requests == 0, "it has ended")
    assert -41 < load.level < -39
    tokens = keyed.service.metrics.tenant_tokens.values
    assert tokens["beta", "prompt"] % 20 == 0
    assert tokens["beta", "generation"] >= 40
    refused = as_tenant(keyed, "beta")
    assert refused.status_code == 429
    assert 35 <= int(refused.headers["retry-after"]) <= 42


def test_weight_and_targets_are_the_requests_own_or_its_tenants_or_the_flags(keyed: Served) -> None:
    """The target for the first token counts from the request's arrival: what it has taken until now is taken off."""
    info = keyed.service.client.info
    assert info is not None
    keyed.service.admission.load_of(keyed.service.tenants.all["beta"]).level = 60.0
    refused = as_tenant(keyed, "root", ttft_slo_ms=200).json()["error"]
    assert (refused["param"], refused["code"]) == ("ttft_slo_ms", "unsupported_parameter")
    assert "--scheduling-policy slo" in refused["message"]
    info.config["scheduling_policy"] = "slo"
    try:
        for name, body, weight, ttft_ms, tpot_ms in (
            ("root", {}, 1.0, 500, 50),
            ("beta", {}, 2.5, 300, 50),
            ("beta", {"ttft_slo_ms": 200, "tpot_slo_ms": 20}, 2.5, 200, 20),
        ):
            assert as_tenant(keyed, name, **body).status_code == 200
            submit = keyed.engine.submits[-1]
            assert (submit.weight, submit.tpot_slo_ns) == (weight, tpot_ms * 1_000_000)
            assert submit.ttft_slo_in_ns is not None
            assert submit.ttft_slo_in_ns < ttft_ms * 1_000_000
    finally:
        del info.config["scheduling_policy"]


def test_no_tenant_puts_itself_before_others_unless_it_may(keyed: Served) -> None:
    info = keyed.service.client.info
    assert info is not None
    info.config["scheduling_policy"] = "priority"
    try:
        refused = as_tenant(keyed, "acme", priority=-(2**40))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert "must be at least 0 for this tenant" in refused.json()["error"]["message"]
        assert as_tenant(keyed, "acme", priority=3).status_code == 200
        assert as_tenant(keyed, "root", priority=-7).status_code == 200
        assert [submit.priority for submit in keyed.engine.submits[-2:]] == [3, -7]
    finally:
        del info.config["scheduling_policy"]


def test_the_servers_limits_on_one_request_name_their_flag(keyed: Served) -> None:
    for prompt_len, max_tokens, flag, param in (
        (91, 3, "--max-input-tokens", "prompt"),
        (20, 81, "--max-output-tokens", "max_tokens"),
        (60, 70, "--max-total-tokens", "max_tokens"),
    ):
        response = as_tenant(keyed, "root", prompt=[5] * prompt_len, max_tokens=max_tokens)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert flag in error["message"]
        assert str(prompt_len) in error["message"] or str(max_tokens) in error["message"]
    assert as_tenant(keyed, "root", prompt=[5] * 90, max_tokens=30).status_code == 200
    unset = as_tenant(keyed, "root", prompt=[5] * 110, max_tokens=None)
    assert unset.json()["error"]["param"] == "prompt"


def test_unknown_fields_can_be_ignored_and_are_then_named(keyed: Served) -> None:
    response = as_tenant(keyed, "root", foo=1, stream_options=None, bar={"a": 1})
    assert response.status_code == 200
    assert response.headers["x-steelyard-ignored-fields"] == "foo, bar"
    assert as_tenant(keyed, "root", suffix="x").json()["error"]["code"] == "unsupported_parameter"
    many = as_tenant(keyed, "root", **{f"f{i}": 1 for i in range(40)})
    assert many.json()["error"]["code"] == "unknown_parameter"


@pytest.mark.parametrize("name", ["", ".", "a.b", "a[0]", "[0]", "messages[0].x", "x" * 300, "\u2028", "prompt[0].a"])
def test_an_unknown_field_whose_name_looks_like_a_path_is_refused_or_ignored(keyed: Served, name: str) -> None:
    response = as_tenant(keyed, "root", **{name: 1})
    assert response.status_code in {200, 400}, response.text
    if response.status_code == 400:
        assert response.json()["error"]["code"] == "unknown_parameter"


def test_a_number_out_of_range_beside_an_unknown_field_is_refused(keyed: Served) -> None:
    raw = b'{"prompt": [5, 5], "foo": 1e400, "bar": 1}'
    headers = {"authorization": f"Bearer {KEYS['root']}"}
    assert keyed.http.post("/v1/completions", content=raw, headers=headers).status_code == 400


def test_a_page_of_an_allowed_origin_may_ask(keyed: Served) -> None:
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    allowed = keyed.http.options("/v1/completions", headers=ask)
    assert allowed.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    assert "POST" in allowed.headers["access-control-allow-methods"]
    got = keyed.http.get("/health", headers={"origin": "https://page.example"})
    assert got.headers["access-control-allow-origin"] == "https://page.example"
    other = keyed.http.options("/v1/completions", headers={**ask, "origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert other.status_code == 401


def test_every_response_carries_a_request_id_the_clients_own_if_it_is_one(served: Served) -> None:
    for path in ("/health", "/v1/models", "/nothing"):
        assert served.http.get(path, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        made = served.http.get(path).headers["x-request-id"]
        assert len(made) == 32
        odd = served.http.get(path, headers={"x-request-id": "a b" + "x" * 200}).headers["x-request-id"]
        assert len(odd) == 32
    streamed = served.http.post(
        "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 2}, headers={"x-request-id": "mine-2"}
    )
    assert streamed.headers["x-request-id"] == "mine-2"


def answer_of(served: Served, *parts: bytes, pause_s: float = 0.0) -> tuple[int, str]:
    """Send bytes as they are and read until the server closes: (status, code of the error)."""
    with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))) as sock:
        sock.settimeout(60)
        try:
            for part in parts:
                sock.sendall(part)
                time.sleep(pause_s)
        except OSError:
            pass
        data = b""
        try:
            while more := sock.recv(65536):
                data += more
        except ConnectionError:
            pass
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)["error"]["code"]) if head else (0, "")


def test_a_head_too_long_or_of_too_many_headers_is_431(served: Served) -> None:
    start_line = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    assert answer_of(served, start_line + b"A: " + b"x" * 9000 + b"\r\n\r\n") == (431, "headers_too_large")
    assert answer_of(served, start_line + b"A: " + b"x" * 5000, b"x" * 5000) == (431, "headers_too_large")
    assert answer_of(served, start_line + b"A: x\r\n" * 50 + b"\r\n") == (431, "headers_too_large")
    assert answer_of(served, b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n") == (431, "headers_too_large")
    assert answer_of(served, b"\x00\x01 nothing like it\r\n\r\n") == (400, "invalid_http")
    assert served.http.get("/health").status_code == 200


def test_a_slow_head_and_a_slow_body_are_given_up_and_an_idle_connection_is_closed(keyed: Served) -> None:
    assert answer_of(keyed, b"GET /health HTTP/1.1\r\nHost: x\r\n") == (408, "request_timeout")
    assert answer_of(keyed) == (0, "")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {KEYS['root']}\r\n"
    slow = answer_of(keyed, head.encode() + b"Content-Length: 90\r\n\r\n{", b'"', b"p", pause_s=0.05)
    assert slow == (408, "request_timeout")
    wait_for(lambda: keyed.service.num_in_flight == 0, "the request is forgotten")


def test_a_reader_that_stops_is_paused_then_dropped_and_its_work_stopped(keyed: Served) -> None:
    """Small buffers on the way, so that the kernel does not take it all."""
    keyed.engine.reply = lambda submit, index: [40] * 100_000
    keyed.engine.per_step = 500
    accept = keyed.engine._accept
    keyed.engine._accept = lambda submit: accept(_unlimited(submit))  # type: ignore[method-assign]
    try:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(keyed.url.rsplit(":", 1)[1])))
        body = {"prompt": [5] * 20, "max_tokens": 80, "stream": True, "logprobs": 5}
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['root']}\r\n"
        sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        wait_for(lambda: any(type(m).__name__ == "Pause" for m in keyed.engine.received), "it is paused")
        wait_for(lambda: bool(keyed.engine.stops), "it is stopped")
        assert keyed.engine.stops[0].reason == "disconnect"
        wait_for(lambda: keyed.service.num_in_flight == 0, "the handler has ended")
        sock.close()
    finally:
        del keyed.engine._accept


def _unlimited(submit: fake_engine.Submit) -> fake_engine.Submit:
    return msgspec.structs.replace(submit, sampling=replace(submit.sampling, max_tokens=100_000))


def test_requests_of_a_stuck_engine_get_an_error_and_new_ones_are_refused(served: Served) -> None:
    served.engine.stalled = True
    sock = post_raw(served, "/v1/completions", {"prompt": "x", "max_tokens": 5})
    wait_for(lambda: bool(served.engine.tasks), "it runs")
    served.run(served.engine.say, fake_engine.idle(stalled_ns=21_000_000_000, detail="1 running"))
    served.run(served.service.client.watch)
    sock.settimeout(60)
    data = b""
    while b"}}" not in data:
        more = sock.recv(65536)
        assert more, data
        data += more
    assert b"no step made progress for 21.0 s: 1 running" in data
    sock.close()
    refused = served.complete(max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    wait_for(lambda: bool(served.engine.stops), "the engine is told")
    served.engine.stalled = False
    served.run(served.engine.say, fake_engine.idle())
    assert served.complete(max_tokens=1).status_code == 200


def test_a_deadline_is_passed_on_less_the_time_spent_and_ends_as_an_error_or_a_reason(served: Served) -> None:
    served.complete(max_tokens=1, deadline_ms=5000, ttft_deadline_ms=1000)
    submit = served.engine.submits[-1]
    assert submit.deadline_in_ns is not None
    assert submit.first_token_in_ns is not None
    assert 0 < 5e9 - submit.deadline_in_ns < 5e9
    assert submit.deadline_in_ns - submit.first_token_in_ns == 4_000_000_000
    success = counter(served, "vllm:request_success_total", finished_reason="deadline")
    served.engine.end_with = "deadline"
    served.engine.reply = lambda submit, index: []
    late = served.complete(deadline_ms=5000)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    served.engine.reply = lambda submit, index: [40, 40]
    partly = served.complete(deadline_ms=5000, return_token_ids=True).json()["choices"][0]
    assert (partly["finish_reason"], partly["token_ids"]) == ("deadline", [40, 40])
    assert counter(served, "vllm:request_success_total", finished_reason="deadline") == success + 2


@pytest.mark.parametrize("kind", ["nothing sent", "begun", "takes nothing"])
def test_a_request_whose_server_closes_is_answered_if_that_needs_no_wait_and_else_hung_up(
    guarded: Served, kind: str
) -> None:
    sent: list[Any] = []
    hung_up: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if kind == "begun":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if kind == "takes nothing":
            await asyncio.Event().wait()
        sent.append(message)

    async def cancelled() -> None:
        scope = {"type": "http", "method": "GET", "path": "/live", "headers": []}
        scope["extensions"] = {ABORT: {"call": lambda: hung_up.append(True)}}
        task = asyncio.ensure_future(Edge(app, guarded.service, {})(scope, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(cancelled())
    expected = {"nothing sent": ([503], False), "begun": ([200], True), "takes nothing": ([], True)}
    assert ([m["status"] for m in sent if "status" in m], bool(hung_up)) == expected[kind]
