"""SIGTERM under load: whoever connects is answered or refused where it connects; none that was made is reset."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steelyard.server.backlog import SocketName, has_queued, turn_away
from tests import tiny_model
from tests.cases.rig import Server, open_request, scripted_servers, wait_for
from tests.server.test_serve import start_serve

REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 31\r\n\r\n"
BODY = b'{"prompt": [5], "max_tokens":1}'
LONG = {"prompt": [5], "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    with scripted_servers(tmp_path_factory.mktemp("last"), 20, "--max-num-queued-reqs", "9999") as start_one:
        yield start_one


def once(address: int | str) -> str:
    """What becomes of one request on a connection of its own: a status, `refused`, or how it broke."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as sock:
        sock.settimeout(30)
        try:
            sock.connect(address if isinstance(address, str) else ("127.0.0.1", address))
        except (ConnectionRefusedError, FileNotFoundError):
            return "refused"
        try:
            sock.sendall(REQUEST)
            sock.sendall(BODY)
            data = b""
            while more := sock.recv(65536):
                data += more
                if data.endswith(b"}"):
                    break
        except ConnectionError as error:
            return type(error).__name__
    if data.startswith(b"HTTP/1.1 503"):
        assert b"retry-after: 5\r\n" in data and b"shutting_down" in data
        assert b"connection: close\r\n" in data
    return data[9:12].decode() or "closed"


def outcomes(process: subprocess.Popen[Any], address: int | str) -> Counter[str]:
    """SIGTERM to a server while eight clients knock until they are refused."""
    seen: list[str] = []

    def knock() -> None:
        outcome = ""
        while outcome != "refused":
            outcome = once(address)
            seen.append(outcome)

    threads = [threading.Thread(target=knock) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: seen.count("200") > 20, 60, lambda: f"{Counter(seen)}")
    process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    assert process.wait(60) == 0
    return Counter(seen)


@pytest.mark.parametrize("fronts", [1, 2])
def test_nobody_is_reset_by_a_shutdown(start: Callable[..., Server], fronts: int) -> None:
    server = start("--api-server-count", str(fronts))
    held = open_request(server, LONG)
    assert held.recv(15) == b"HTTP/1.1 200 OK"
    seen = outcomes(server.process, server.port)
    assert seen.keys() == {"200", "503", "refused"}, seen
    assert seen["refused"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("fronts", ["1", "2"])
def test_nobody_is_reset_on_a_unix_socket(fronts: str, tmp_path: Path) -> None:
    path, script = str(tmp_path / "s"), tmp_path / "script.json"
    script.write_text(json.dumps({"eos_token_id": 2, "default": [40] * 1900}))
    flags = ["--script", str(script), "--uds", path, "--api-server-count", fronts, "--max-num-queued-reqs", "9999"]
    process, text = start_serve(tiny_model.write(tmp_path / "tiny"), *flags)
    try:
        assert path in text
        seen = outcomes(process, path)
        assert seen.keys() <= {"200", "503", "refused"} and seen["refused"] == 8
        assert not Path(path).exists()
    finally:
        process.kill()
        process.communicate()


def test_what_waits_in_the_queue_is_answered_too(start: Callable[..., Server]) -> None:
    """A server that is held while its signal and forty requests come finds all of them at once."""
    server = start()
    os.kill(server.process.pid, signal.SIGSTOP)
    socks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    for sock in socks:
        sock.sendall(REQUEST + BODY)
    server.process.send_signal(signal.SIGTERM)
    os.kill(server.process.pid, signal.SIGCONT)
    for sock in socks:
        sock.settimeout(30)
        assert sock.recv(65536).startswith(b"HTTP/1.1 503")
    assert server.process.wait(60) == 0


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_socket_that_turns_away_keeps_who_was_there(family: socket.AddressFamily, tmp_path: Path) -> None:
    address = ("127.0.0.1", 0) if family == socket.AF_INET else str(tmp_path / "s")
    with socket.socket(family) as listening, socket.socket(family) as early, socket.socket(family) as late:
        listening.bind(address)
        listening.listen(5)
        assert not has_queued(listening)
        early.connect(listening.getsockname())
        turn_away(listening, SocketName.of(str(tmp_path / "s")))
        assert has_queued(listening)
        late.settimeout(0.2)
        with pytest.raises((TimeoutError, FileNotFoundError)):
            late.connect(str(tmp_path / "s") if family == socket.AF_UNIX else listening.getsockname())
        accepted, _ = listening.accept()
        early.sendall(b"both ways")
        assert accepted.recv(9) == b"both ways" and not has_queued(listening)
        accepted.close()


def test_a_name_that_is_another_sockets_by_now_is_left(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as old, socket.socket(socket.AF_UNIX) as new:
        assert SocketName.of(path) is None
        old.bind(path)
        name = SocketName.of(path)
        assert name is not None
        os.rename(path, tmp_path / "kept")  # so that its inode is not given out again
        new.bind(path)
        turn_away(old, name)
        assert os.path.exists(path)
        os.rename(tmp_path / "kept", path)
        turn_away(old, name)
        assert not os.path.exists(path)
