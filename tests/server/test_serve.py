"""`steelyard serve` as a process: why it does not start, and what happens when its engine or its operator ends it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from steelyard.cli.main import main
from steelyard.cli.serve import ENGINE_EXIT_S
from tests import tiny_model

SERVE = [sys.executable, "-m", "steelyard.cli.main", "serve"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


def failure(*args: str) -> str:
    """The one line a failed start prints; it must exit with 2, without a traceback."""
    done = subprocess.run([*SERVE, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("steelyard serve: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.count(lines[0].removeprefix("steelyard serve: ")) == 1, done.stderr
    return lines[0]


def test_a_taken_port_is_said_before_anything_is_loaded(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = failure(str(model), "--port", str(port))
    assert f"port {port}" in line
    assert "--port" in line


def test_a_missing_model_and_a_bad_flag_are_said_in_one_line() -> None:
    assert "no model './nothing-here'" in failure("./nothing-here", "--port", "0")
    assert "--block-size" in failure("smollm2", "--block-size", "24", "--port", "0")
    assert "one server a device" in failure("smollm2", "--tensor-parallel-size", "2")
    assert "no model" in failure("./nothing-here", "--port", "0", "--tensor-parallel-size", "1")


def test_what_the_engine_says_when_it_cannot_start_is_the_line_and_said_once(model: Path) -> None:
    line = failure(str(model), "--port", "0", "--kv-cache-memory-bytes", "1000")
    assert "the least to serve with is 128" in line and "--num-gpu-blocks-override" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-speculative-tokens", "2", "--async-scheduling"], "--num-speculative-tokens"),
        (["--deterministic", "--kv-window", "64"], "--deterministic has no bounded KV"),
        (["--otlp-traces-endpoint", "localhost:4317"], "--otlp-traces-endpoint must be a URL"),
        (["--public-prefix", "/nothing/here"], "--public-prefix /nothing/here: No such file"),
        (["--ledger-log", "/nothing/here"], "--ledger-log /nothing/here: No such file"),
        (["--ssl-certfile", "/nothing", "--ssl-keyfile", "/nothing"], "--ssl-certfile and --ssl-keyfile /nothing"),
    ],
)
def test_flags_that_cannot_be_had_are_refused_before_a_model_is_looked_for(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/such/model", "--port", "0", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and "/no/such/model" not in error


@pytest.fixture
def running(model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A scripted server that answers for a long time: (process, url). Its stdout has been read up to the address."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"eos_token_id": 2, "default": [40] * 1900}))
    process = subprocess.Popen(
        [*SERVE, str(model), "--script", str(script), "--port", "0", "--shutdown-timeout", "0.5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    text = ""
    while (line := process.stdout.readline()) and "-d '" not in line:
        text += line
    text += line
    url = re.search(r"http://[\d.:]+", text)
    assert url is not None, text
    yield process, text
    process.kill()
    process.wait()


def _url(text: str) -> str:
    match = re.search(r"http://[\d.:]+", text)
    assert match is not None
    return match[0]


def _held_stream(url: str, engine: int) -> tuple[threading.Thread, list[str]]:
    """A stream whose engine is stopped after its first tokens; the lines it gets until its end."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": [5], "max_tokens": 1900, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 3:
                    os.kill(engine, signal.SIGSTOP)
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    return thread, lines


def _engine(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


def test_a_killed_engine_is_an_error_to_its_requests_a_503_and_an_exit_status(
    running: tuple[subprocess.Popen[str], str],
) -> None:
    process, text = running
    url, engine = _url(text), _engine(process)
    thread, lines = _held_stream(url, engine)
    os.kill(engine, signal.SIGKILL)
    seen = ""
    deadline = time.monotonic() + 60
    while "killed by signal 9" not in seen:
        assert time.monotonic() < deadline, seen
        try:
            seen = httpx.get(f"{url}/health").text
        except httpx.TransportError as error:
            raise AssertionError(f"the server left before its health said why; last: {seen}") from error
        time.sleep(0.02)
    thread.join()
    assert "data: [DONE]" not in lines
    assert "killed by signal 9" in [line for line in lines if line][-1]
    assert process.wait(60) == 1


def test_the_printed_curl_line_works_and_what_outlives_the_shutdown_timeout_gets_an_error_event(
    running: tuple[subprocess.Popen[str], str],
) -> None:
    process, text = running
    command = text[text.index("curl") :].strip() + " -s"
    pasted = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert json.loads(pasted.stdout)["choices"][0]["finish_reason"] == "length"
    engine = _engine(process)
    thread, lines = _held_stream(_url(text), engine)
    process.send_signal(signal.SIGTERM)
    thread.join()
    os.kill(engine, signal.SIGCONT)
    assert "data: [DONE]" not in lines
    assert "shut down" in [line for line in lines if line][-1]
    assert process.wait(60) == 0


def start_serve(model: Path, *args: str) -> tuple[subprocess.Popen[str], str]:
    """A scripted server with these flags: (process, what it printed up to the pasted body)."""
    process = subprocess.Popen([*SERVE, str(model), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    text = ""
    while (line := process.stdout.readline()) and "-d '" not in line:
        text += line
    return process, text + line


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"eos_token_id": 2, "default": [40] * 1900}))
    return str(path)


def test_a_file_of_flags_a_unix_socket_and_a_second_sigterm(model: Path, script: str, tmp_path: Path) -> None:
    """A drain of a minute is cut short by the second signal."""
    path = tmp_path / "s.sock"
    flags = {"script": script, "uds": str(path), "shutdown-timeout": 60, "served-model-name": "from-file"}
    keys = tmp_path / "keys"
    keys.write_text("sk-a\n")
    config = tmp_path / "serve.toml"
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in flags.items()]
    config.write_text("".join(lines) + f'api_key_file = "{keys}"\nignore-unknown-fields = true\n')
    process, text = start_serve(model, "--config", str(config), "--served-model-name", "from-line")
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        assert "from-line" in text
        assert "Bearer KEY" in text
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as http:
            assert http.get("/health").status_code == 200
            assert http.get("/v1/models").status_code == 401
            key = {"authorization": "Bearer sk-a"}
            assert http.get("/v1/models", headers=key).json()["data"][0]["id"] == "from-line"
            engine = _engine(process)
            os.kill(engine, signal.SIGSTOP)
            body = {"prompt": [5], "max_tokens": 1900, "stream": True, "unknown": 1}
            raw = socket.socket(socket.AF_UNIX)
            raw.connect(str(path))
            data = json.dumps(body)
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-a\r\n"
            raw.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 60
            while http.get("/health").status_code != 503:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        raw.settimeout(20)
        while raw.recv(65536):
            pass
        raw.close()
        assert process.wait(30) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)
        assert not path.exists()
    finally:
        process.kill()
        process.wait()


def test_a_second_sigterm_while_a_body_is_coming_is_answered_and_calm(model: Path, script: str) -> None:
    process, text = start_serve(model, "--script", script, "--port", "0", "--shutdown-timeout", "60")
    try:
        raw = socket.create_connection(_url(text).removeprefix("http://").split(":"), timeout=20)
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert process.stderr is not None
        process.send_signal(signal.SIGTERM)
        while "draining: 1 requests" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
        raw.close()
        assert answer.startswith(b"HTTP/1.1 503 ") and b"shut down" in answer
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in errors and "ERROR" not in errors, errors
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https_behind_a_prefix_a_warning_when_public_without_a_key_and_every_process_logs_json(
    model: Path, script: str, tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    tls = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    config = tmp_path / "serve.toml"
    config.write_text('log-format = "json"\n')
    more = ["--host", "0.0.0.0", "--port", "0", "--script", script, "--root-path", "/llm", "--config", str(config)]
    process, text = start_serve(model, *tls, *more)
    try:
        url = re.search(r"https://[\d.:]+", text)
        assert url is not None, text
        with httpx.Client(verify=ssl.create_default_context(cafile=str(certificate)), base_url=url[0]) as http:
            assert http.get("/health").status_code == 200
            assert http.get("/v1/models").json()["object"] == "list"
        with pytest.raises(httpx.TransportError):
            httpx.get(url[0].replace("https", "http") + "/health")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        logged = [json.loads(line) for line in errors.splitlines()]
        assert any("anybody who reaches" in entry["message"] for entry in logged)
        assert any(entry["logger"].startswith("steelyard.engine") for entry in logged), "of every process"
    finally:
        process.kill()
        process.wait()


def test_a_mistake_in_the_file_of_flags_or_of_tenants_is_one_line(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("prot = 80\n")
    assert "there is no flag --prot; did you mean --port?" in failure(str(model), "--config", str(config))
    config.write_text("[[tenant]]\nname = 5\n")
    assert "--tenants" in failure(str(model), "--port", "0", "--tenants", str(config))
    assert "give both" in failure(str(model), "--port", "0", "--ssl-keyfile", "x")


def test_sighup_reads_the_keys_again_and_a_mistake_changes_nothing(model: Path, script: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-a\n")
    process, text = start_serve(model, "--script", script, "--port", "0", "--api-key-file", str(keys))
    try:
        with httpx.Client(base_url=_url(text)) as http:

            def status(key: str) -> int:
                return http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

            assert (status("sk-a"), status("sk-b")) == (200, 401)
            keys.write_text("sk-b\n")
            process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + 60
            while (status("sk-a"), status("sk-b")) != (401, 200):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            keys.write_text("")
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
            assert "the tenants stay as they were" in errors
            assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_a_server_that_is_stopped_while_it_loads_does_not_wait_for_its_engine(
    model: Path, script: str, fronts: str
) -> None:
    flags = ["--script", script, "--port", "0", "--api-server-count", fronts]
    process = subprocess.Popen([*SERVE, str(model), *flags], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = ""
    while "loading" not in seen:
        seen += process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(0.8 * ENGINE_EXIT_S) == 2
    assert "stopped while the model was loading" in process.stderr.read()
    process.stderr.close()
