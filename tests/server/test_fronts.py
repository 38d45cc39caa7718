"""Several front ends on one port: whichever answers, limits, metrics and ledgers are those of the whole server.

Who has which connection is read from /proc, as Linux has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from steelyard.errors import Overloaded
from steelyard.server import siblings
from steelyard.server.metrics import Metrics
from steelyard.server.response_store import ResponseStore
from steelyard.server.siblings import Hub, Link
from steelyard.server.tenants import hash_key
from tests.cases.rig import Server, scripted_servers, wait_for

OPERATOR = {"authorization": "Bearer sk-operator"}
TENANT = {"authorization": "Bearer sk-acme"}
SLOW = {"prompt": [5, 6], "max_tokens": 1900, "stream": True, "ignore_eos": True}
WITHIN_S = 60.0
"""For what takes a moment where nothing else runs: a front end's start is seconds of imports on a busy machine."""


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(f'[[tenant]]\nname = "acme"\nkeys = ["{hash_key("sk-acme")}"]\nmax_concurrent_requests = 6\n')
    return path


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tenants: Path) -> Iterator[Callable[..., Server]]:
    """A server of two front ends whose steps take 20 ms; its log is beside its model."""
    flags = ("--api-server-count", "2", "--tenants", str(tenants), "--api-key", "sk-operator")
    with scripted_servers(tmp_path_factory.mktemp("fronts"), 20, *flags, key="sk-operator") as start_one:
        yield start_one


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start()


def fronts(server: Server) -> list[int]:
    """Process ids of the front ends; the engine is the other child."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"steelyard.cli.front" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def engine(server: Server) -> int:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    [pid] = set(map(int, children)) - set(fronts(server))
    return pid


def anew(
    server: Server, method: str, path: str, headers: dict[str, str] = OPERATOR, body: Any = None
) -> httpx.Response:
    """On a connection of its own: the kernel chooses the front end."""
    return httpx.request(method, server.url + path, headers=headers, json=body, timeout=WITHIN_S)


def owner(server: Server, sock: socket.socket) -> int:
    """Which front end has the other end of a connection."""
    port = sock.getsockname()[1]
    with open("/proc/net/tcp") as table:
        ends = (f":{server.port:04X}", f":{port:04X}")  # both: elsewhere on the machine one of them may be in use too
        [inode] = [c[9] for c in map(str.split, table) if (c[1][-5:], c[2][-5:]) == ends]
    for pid in fronts(server):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(fd) == f"socket:[{inode}]":
                    return pid
            except FileNotFoundError:
                continue
    raise AssertionError("nobody has the connection")


def hold(server: Server, pid: int | None = None) -> socket.socket:
    """A stream of `acme` that runs on, at front end `pid` if one is named."""
    raw = json.dumps(SLOW).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-acme\r\nContent-Length: {len(raw)}\r\n"
    )
    for _ in range(200):
        sock = socket.create_connection(("127.0.0.1", server.port))
        wait_for(lambda: any(owner_or_none(server, sock)), WITHIN_S, lambda: "nobody accepts")  # noqa: B023
        if pid is None or owner(server, sock) == pid:
            sock.sendall(head.encode() + b"\r\n" + raw)
            sock.settimeout(WITHIN_S)
            assert sock.recv(15) == b"HTTP/1.1 200 OK"
            return sock
        sock.close()
    raise AssertionError("no connection came to that front end")


def owner_or_none(server: Server, sock: socket.socket) -> Iterator[int]:
    try:
        yield owner(server, sock)
    except (AssertionError, ValueError):
        return


def test_whichever_front_end_answers_it_speaks_for_all(server: Server) -> None:
    ids: list[str] = []
    by_hand = fronts(server) * 2
    for pid in by_hand:
        hold(server, pid).close()
    for _ in range(12):
        answer = anew(server, "POST", "/v1/completions", TENANT, {"prompt": [5], "max_tokens": 2}).json()
        ids.append(answer["id"])
    server.check_idle()
    labels = 'endpoint="/v1/completions",status="200"'
    for _ in range(8):
        page = anew(server, "GET", "/metrics").text
        responses = f'steelyard:http_responses_total{{model_name="tiny",{labels}}} {1 + len(by_hand) + len(ids)}'
        assert responses in page
        listed = anew(server, "GET", "/ledger/requests?last=100", TENANT).json()["requests"]
        assert set(ids) <= {record["id"] for record in listed}
        assert len(listed) == len(ids) + len(by_hand)
        ends = [record["started_s"] + record["total_ns"] / 1e9 for record in listed]
        assert ends == sorted(ends)
    for id in ids:
        found = anew(server, "GET", f"/ledger/requests/{id}", TENANT)
        assert (found.status_code, found.json()["id"]) == (200, id)
    assert anew(server, "GET", "/ledger/requests/nothing").status_code == 404


def test_what_a_front_end_has_shown_as_counted_stays_counted_when_it_dies(tmp_path: Path) -> None:
    shown = Metrics()
    shown.lost_lines.add(3, "server")

    async def nothing(what: str, value: Any) -> Any:
        return Metrics().snapshot()

    async def total() -> Metrics:
        hub, path, links = Hub(lambda index: None), str(tmp_path / "hub"), list[Link]()
        await hub.open(path)
        for index in range(2):
            links.append(Link(*await asyncio.open_unix_connection(path), nothing))
            running.append(asyncio.ensure_future(links[-1].run()))
            await links[-1].ask("listening", index)
        await links[0].ask("metrics", shown.snapshot())
        hub.lost(0)
        found = Metrics()
        for snapshot in await links[1].ask("metrics", Metrics().snapshot()):
            found.add(snapshot)
        hub.close()
        for link in links:
            link.close()
        await asyncio.gather(*running)
        return found

    running: list[asyncio.Future[None]] = []
    assert asyncio.run(total()).snapshot() == shown.snapshot()


def test_a_kept_response_is_found_and_forgotten_by_every_front_end(server: Server) -> None:
    body = {"input": "hello", "max_output_tokens": 2}
    first = anew(server, "POST", "/v1/responses", TENANT, body).json()
    for _ in range(6):
        assert anew(server, "GET", f"/v1/responses/{first['id']}", TENANT).json() == first
        later = anew(server, "POST", "/v1/responses", TENANT, {**body, "previous_response_id": first["id"]})
        assert later.status_code == 200, later.text
        assert later.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert anew(server, "GET", f"/v1/responses/{first['id']}").status_code == 404
    assert anew(server, "DELETE", f"/v1/responses/{first['id']}", TENANT).status_code == 200
    assert [anew(server, "GET", f"/v1/responses/{first['id']}", TENANT).status_code for _ in range(6)] == [404] * 6


@pytest.mark.parametrize("silent", [False, True])
def test_what_a_silent_front_end_may_keep_is_not_said_to_be_missing(
    silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "ANSWER_S", 0.1)
    path = str(tmp_path / "hub")
    services: list[Any] = [SimpleNamespace(responses=ResponseStore(time.monotonic_ns)) for _ in range(2)]
    services[1].responses.keep("acme", "resp_1", [], {"id": "resp_1"})

    async def says_nothing(what: str, value: Any) -> None:
        await asyncio.Event().wait()

    async def look() -> list[Any]:
        hub = Hub(lambda index: None)
        await hub.open(path)
        links = [await siblings.join(path, i, service, print) for i, service in enumerate(services)]
        if silent:
            links.append(Link(*await asyncio.open_unix_connection(path), says_nothing))
        running = [asyncio.ensure_future(link.run()) for link in links]
        for index, link in enumerate(links):
            await link.ask("listening", index)
        try:
            assert len(await services[0].ask_others("response", ["acme", "resp_1"])) == 1, "who has it has answered"
            return list(await services[0].ask_others("response", ["acme", "resp_2"]))
        finally:
            for link in links:
                link.close()
            await asyncio.gather(*running)
            hub.close()

    if silent:
        with pytest.raises(Overloaded, match="another front end"):
            asyncio.run(look())
    else:
        assert asyncio.run(look()) == []


def test_a_limit_is_that_of_all_and_a_killed_front_end_gives_back_what_it_held(server: Server) -> None:
    first, second = fronts(server)
    held = [hold(server, pid) for pid in (first, first, first, second, second, second)]
    for _ in range(8):
        refused = anew(server, "POST", "/v1/completions", TENANT, {"prompt": [5], "max_tokens": 2})
        assert refused.status_code == 429
        assert "6 requests are being served, the limit is 6" in refused.json()["error"]["message"]
    counted = server.metrics()["vllm:admission_rejections_total{rate_limit_exceeded}"]
    assert counted == 8
    time.sleep(1.2)  # what is counted is remembered once a second
    os.kill(first, signal.SIGKILL)
    server.http.close()  # one of its connections may be of the dead one
    server.http = httpx.Client(base_url=server.url, headers=OPERATOR, timeout=60)
    wait_for(
        lambda: first not in fronts(server) and len(fronts(server)) == 2, WITHIN_S, lambda: "it is not started again"
    )
    for sock in held[:3]:
        assert read_to_end(sock) is not None
    wait_for(
        lambda: anew(server, "GET", "/metrics").text.count("vllm:num_requests_running") > 0, WITHIN_S, lambda: "silent"
    )
    wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 3, WITHIN_S, lambda: "its requests still run")
    for _ in range(6):
        assert anew(server, "POST", "/v1/completions", TENANT, {"prompt": [5], "max_tokens": 2}).status_code == 200
    assert server.metrics()["vllm:admission_rejections_total{rate_limit_exceeded}"] >= counted
    for sock in held[3:]:
        assert sock.recv(10)
        sock.close()
    server.check_idle()


def read_to_end(sock: socket.socket) -> bytes:
    """What comes until the connection ends, in whatever way; never the end of a whole stream."""
    data = b""
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionError:
        pass
    assert b"[DONE]" not in data
    return data


def test_sigterm_drains_every_front_end_and_what_is_left_gets_an_error(server: Server) -> None:
    held = [hold(server, pid) for pid in fronts(server)]
    server.process.send_signal(signal.SIGTERM)
    for sock in held:
        assert b"shut down" in read_to_end(sock)
    assert server.process.wait(WITHIN_S) == 0
    assert subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True).stdout == b""


@pytest.mark.slow
def test_the_engines_death_is_said_by_every_front_end_and_ends_all(start: Callable[..., Server]) -> None:
    server = start()
    held = [hold(server, pid) for pid in fronts(server)]
    os.kill(engine(server), signal.SIGKILL)
    with ThreadPoolExecutor(len(held)) as pool:
        ends = list(pool.map(read_to_end, held))
    assert all(b"killed by signal 9" in data for data in ends)
    assert server.process.wait(WITHIN_S) == 1


@pytest.mark.slow
def test_a_broken_file_of_tenants_and_sighup_while_a_front_end_starts_end_nothing(
    start: Callable[..., Server], tenants: Path
) -> None:
    server, good = start(), tenants.read_text()
    tenants.write_text("[[tenant]]\nkeys = 5\n")
    again = start_again(server)
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "the tenants stay as they were" in server.log.read_text(), WITHIN_S, lambda: "not heard")
    hold(server, again).close()
    tenants.write_text(good)
    start_again(server)
    server.process.send_signal(signal.SIGHUP)
    read = "the tenants were read again"
    wait_for(
        lambda: server.log.read_text().count(read) == 2 or server.process.poll() is not None, WITHIN_S, lambda: read
    )
    assert server.process.poll() is None
    assert [anew(server, "GET", "/ledger/requests", TENANT).status_code for _ in range(6)] == [200] * 6


def start_again(server: Server) -> int:
    """Kill a front end; the process id of the one that takes its place, which does not listen yet."""
    before = fronts(server)
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: set(fronts(server)) - set(before) != set(), WITHIN_S, lambda: "it is not started again")
    [again] = set(fronts(server)) - set(before)
    return again


@pytest.mark.slow
def test_a_front_end_that_cannot_start_again_ends_the_server(start: Callable[..., Server]) -> None:
    server = start()
    os.kill(start_again(server), signal.SIGKILL)
    assert server.process.wait(WITHIN_S) == 1
    assert "the server ends" in server.log.read_text()
