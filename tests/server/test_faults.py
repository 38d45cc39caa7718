"""Faults of processes, clients and disks on a real server: a defined end for every client, and nothing left behind.

After each: no block, row, queue place or reservation is held, by the engine's own books (/metrics of a server that runs
with --check-invariants, whose engine drains at the first broken one) and by the server's.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from steelyard.wire import logs
from tests import tiny_model
from tests.cases.rig import Server, open_request, scripted_servers, wait_for

LONG = {"prompt": [5, 6], "max_tokens": 1900, "ignore_eos": True, "stream": True}
_CLIENT = """
import json, socket, sys
body = json.dumps({"prompt": [5, 6], "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
head = f"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode()
socks = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
for sock in socks:
    sock.sendall(head + body)
for sock in socks:
    sock.recv(1000)
print("all stream", flush=True)
while True:
    for sock in socks:
        sock.recv(100000)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """A scripted server whose steps take 10 ms, with these flags."""
    with scripted_servers(tmp_path_factory.mktemp("faults"), 10, "--check-invariants") as start_one:
        yield start_one


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    flags = ["--max-num-seqs", "600", "--num-gpu-blocks-override", "80000", "--max-num-queued-reqs", "600"]
    return start(*flags, "--header-timeout", "1", "--body-timeout", "1", "--stall-limit", "1.5")


def same_after(server: Server) -> None:
    """Nothing is held, the books agree, and the canary answers as before."""
    server.check_idle(within_s=10)
    server.check_canary()
    assert "broken" not in server.log.read_text()


def test_500_clients_killed_in_the_middle_of_their_streams(server: Server) -> None:
    before = server.settled()
    client = subprocess.Popen([sys.executable, "-c", _CLIENT, str(server.port), "500"], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"all stream\n"
    assert server.settled()["vllm:num_requests_running"] == 500
    client.kill()
    client.wait()
    same_after(server)
    assert server.grown(before, "vllm:request_success_total{abort}") == 500
    assert server.grown(before, "vllm:generation_tokens_total") < 500 * 1900


def test_a_stopped_engine_is_a_503_and_an_error_and_goes_on_when_it_runs_again(server: Server) -> None:
    sock = open_request(server, LONG)
    sock.settimeout(20)
    assert sock.recv(15) == b"HTTP/1.1 200 OK"
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        wait_for(lambda: server.http.get("/health").status_code == 503, 20, lambda: "it is still healthy")
        assert "has said nothing for" in server.http.get("/health").json()["reason"]
        assert "has said nothing for" in read_to_end(sock)
        refused = server.post("/v1/completions", {"prompt": [5], "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    wait_for(lambda: server.http.get("/health").status_code == 200, 20, lambda: "it does not come back")
    same_after(server)


def test_1000_idle_connections_and_slow_heads_and_bodies_hold_up_nobody(server: Server) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1000)]
    heads = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    bodies = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    for sock in bodies:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    try:
        for drip in (b"GET /health HTTP/1.1\r\n", b"A: b\r\n", b"C: d\r\n"):
            for sock in heads:
                sock.sendall(drip)
            assert server.post("/v1/completions", {"prompt": [5], "max_tokens": 2}).status_code == 200
        assert {status_of(sock) for sock in heads} == {b"408"}
        assert {status_of(sock) for sock in bodies} == {b"408"}
        for sock in idle:
            sock.settimeout(10)
            assert sock.recv(1) == b""
    finally:
        for sock in (*idle, *heads, *bodies):
            sock.close()
    same_after(server)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb_is_refused_without_being_kept(server: Server, declared: bool) -> None:
    """By its declared length, or as soon as the limit is passed; memory does not grow by the body."""
    status = Path(f"/proc/{server.process.pid}/status")
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(10)
    length = b"Content-Length: 100000000" if declared else b"Transfer-Encoding: chunked"
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n\r\n")
    piece = b" " * 1_000_000
    try:
        for _ in range(100):
            sock.sendall(piece if declared else b"f4240\r\n" + piece + b"\r\n")
    except OSError:
        pass
    assert status_of(sock) == b"413"
    sock.close()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    held = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
    assert peak is not None and held is not None
    assert int(peak[1]) - int(held[1]) < 90_000
    same_after(server)


@pytest.mark.parametrize(
    "held_to",
    [
        {"grammar": "start: ( unclosed"},
        {"grammar": "start: missing_rule"},
        {"regex": "(a+"},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"json": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}},
        {"json": {"type": "nonsense"}},
    ],
)
def test_a_malformed_grammar_is_refused_before_anything_is_taken(server: Server, held_to: dict[str, Any]) -> None:
    before = server.settled()
    refused = server.post("/v1/completions", {"prompt": [5], "max_tokens": 4, "structured_outputs": held_to})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"].startswith("structured_outputs")
    assert server.grown(before, "vllm:prompt_tokens_total") == 0
    same_after(server)


def test_logs_that_cannot_be_written_cost_lines_and_no_request(tmp_path: Path) -> None:
    """The server's, its engine's and the ledger's on a full disk."""
    model = tiny_model.write(tmp_path / "tiny")
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"eos_token_id": 2, "default": [40] * 20}))
    server = Server(model, ["--script", str(script), "--ledger-log", "/dev/full"], Path("/dev/full"))
    for _ in range(5):
        server.check_canary()
    name = "steelyard:log_lines_lost_total{ledger}"
    wait_for(lambda: server.metrics()[name] >= 5, 10, lambda: str(server.metrics()[name]))
    assert server.metrics()["steelyard:log_lines_lost_total{server}"] > 0
    server.check_idle()
    assert server.stop() == 0


def test_a_line_the_disk_does_not_take_is_counted() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lost: list[int] = []
    handler = logs.Handler(Full())
    handler.on_lost = lambda: lost.append(1)
    for _ in range(3):
        handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, "a line", None, None))
    assert len(lost) == 3


def read_to_end(sock: socket.socket) -> str:
    data = b""
    while b"}}\n\n" not in data and (more := sock.recv(65536)):
        data += more
    return data.decode()


def status_of(sock: socket.socket) -> bytes:
    sock.settimeout(10)
    try:
        return sock.recv(1000).split(b" ")[1]
    except ConnectionError:
        return b"reset"


def overload(server: Server, seconds: float, capacity: int) -> dict[int, int]:
    """Twice as many callers as there are places to run and to wait, for so long; answers by status."""
    found: dict[int, int] = {}
    lock = threading.Lock()
    ends = time.monotonic() + seconds

    def call() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while time.monotonic() < ends:
                answer = http.post("/v1/completions", json={"prompt": [5] * 20, "max_tokens": 20, "ignore_eos": True})
                body = answer.json()
                if answer.status_code == 503:
                    assert body["error"]["code"] == "overloaded" and "the limit is" in body["error"]["message"]
                    assert int(answer.headers["retry-after"]) >= 1
                    time.sleep(0.05)
                else:
                    assert body["usage"]["completion_tokens"] == 20
                with lock:
                    found[answer.status_code] = found.get(answer.status_code, 0) + 1

    threads = [threading.Thread(target=call) for _ in range(2 * capacity)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.slow)])
def test_twice_capacity_serves_what_fits_refuses_the_rest_and_leaves_nothing(
    start: Callable[..., Server], seconds: int
) -> None:
    server = start("--max-num-seqs", "8", "--max-num-queued-reqs", "8")
    found = overload(server, seconds, capacity=16)
    assert set(found) == {200, 503}
    assert found[200] >= 16
    same_after(server)
    assert server.metrics()["vllm:admission_rejections_total{overloaded}"] == found[503]
