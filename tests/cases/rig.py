"""Real servers as subprocesses, and what every case asks of them: tokens, metrics, the canary, the idle invariant.

steelyard serve TINY --port 0 ... --> Server: complete(), chat(), metrics(), check_idle()
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests import tiny_model

START_S = 120.0
IDLE_S = 60.0
REPORT_S = 0.15
NEAR_TIE = 1e-3
"""Natural log. Two best tokens closer than this may change places with the shape of a batch."""

CANARY = [11, 60, 77, 42, 99, 150, 33]


@dataclass(frozen=True)
class Answer:
    """One choice: ids, text, reason, and the gap between the best two tokens at each position (solo only)."""

    ids: list[int]
    text: str
    finish_reason: str
    cached_tokens: int
    gaps: list[float]


class Server:
    """A running `steelyard serve`. `engine_pid` is its only child."""

    def __init__(self, model: Path, args: Sequence[str], log: Path, key: str | None = None) -> None:
        self.log = log
        self._out = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "steelyard.cli.main", "serve", str(model), "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=self._out,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.url = self._address()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.Client(base_url=self.url, timeout=250, limits=limits, headers=headers)
        self.canary = self.complete(CANARY, max_tokens=8).ids

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def completions(self, **body: Any) -> dict[str, Any]:
        """Greedy, whole and without an early end unless the body says otherwise."""
        response = self.post("/v1/completions", {"temperature": 0, "ignore_eos": True, **body})
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    def complete(self, prompt: list[int] | str, **body: Any) -> Answer:
        answer = self.completions(prompt=prompt, return_token_ids=True, **body)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return _answer(answer["choices"][0], cached)

    def together(self, bodies: Iterable[dict[str, Any]], at_once: int = 64) -> list[Answer]:
        """All bodies at the same time (at most `at_once`), answers in their order."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda body: self.complete(**body), bodies))

    def stream(self, path: str = "/v1/completions", **body: Any) -> Iterator[tuple[float, str]]:
        """(arrival time, data) of each event, by a strict reader."""
        with self.http.stream("POST", path, json={"stream": True, **body}) as response:
            if response.status_code != 200:
                raise AssertionError(response.read().decode())
            yield from strict_events(response.iter_bytes())

    def metrics(self) -> dict[str, float]:
        """Samples by name; one with labels besides the model's as name{value,...}."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                labels = [value for name, value in sample.labels.items() if name != "model_name"]
                found[sample.name + (f"{{{','.join(labels)}}}" if labels else "")] = sample.value
        return found

    def grown(self, before: dict[str, float], name: str) -> float:
        """How much a metric has grown, in `settled` metrics."""
        return self.settled().get(name, 0.0) - before.get(name, 0.0)

    def settled(self) -> dict[str, float]:
        """Metrics that include every step that was run before this call: the engine reports every 100 ms, or later."""
        time.sleep(REPORT_S)
        steps = self.http.get("/ledger/steps?last=1").json()["steps"]
        last, found = steps[-1]["id"] if steps else 0, self.metrics()

        def is_told() -> bool:
            found.update(self.metrics())
            return found["steelyard:steps_total"] >= last

        wait_for(is_told, IDLE_S, lambda: f"step {last} is not reported: {found}")
        return found

    def check_idle(self, within_s: float = IDLE_S) -> None:
        """Nothing runs, waits or holds a block, within `within_s`; health is 200."""
        state: dict[str, float] = {}

        def idle() -> bool:
            nonlocal state
            state = self.metrics()
            assert state["steelyard:kv_blocks{clean}"] + state["steelyard:kv_blocks{cached}"] <= self.num_blocks(state)
            return not (
                state["vllm:num_requests_running"]
                or state["vllm:num_requests_waiting"]
                or state["steelyard:kv_blocks{active}"]
            )

        wait_for(idle, within_s, lambda: f"not idle: {state}")
        assert state["steelyard:kv_blocks{clean}"] + state["steelyard:kv_blocks{cached}"] == self.num_blocks(state)
        assert min(state.values()) >= 0
        assert self.http.get("/health").status_code == 200

    @staticmethod
    def num_blocks(state: dict[str, float]) -> float:
        return state["steelyard:kv_blocks{total}"]

    def check_canary(self) -> None:
        assert self.complete(CANARY, max_tokens=8).ids == self.canary

    def stop(self, timeout_s: float = 30) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.http.close()
            self._out.close()

    def _address(self) -> str:
        """Reads stdout up to the address; the rest is drained by a thread."""
        assert self.process.stdout is not None
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if match := re.search(rb"on (http://\S+)$", line.strip()):
                    threading.Thread(target=self.process.stdout.read, daemon=True).start()
                    return match[1].decode()
        finally:
            timer.cancel()
        raise AssertionError(f"the server did not start:\n{self.log.read_text()}")


@contextmanager
def scripted_servers(
    folder: Path, step_ms: float, *common: str, key: str | None = None
) -> Iterator[Callable[..., Server]]:
    """Starts servers whose steps take so long and whose answers are one token 1900 times, with `common` flags and
    those of each; every log is in `folder`, and all are stopped at the end."""
    model = tiny_model.write(folder / "tiny")
    script = folder / "script.json"
    script.write_text(json.dumps({"eos_token_id": 2, "default": [40] * 1900, "step_ms": step_ms}))
    started: list[Server] = []

    def start(*flags: str) -> Server:
        log = folder / f"{len(started)}.log"
        flags = ("--script", str(script), "--shutdown-timeout", "1", *common, *flags)
        started.append(Server(model, flags, log, key))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            server.stop()


def open_request(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """Send a request on a socket of its own, and leave its answer unread."""
    raw = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return sock


def strict_events(chunks: Iterable[bytes]) -> Iterator[tuple[float, str]]:
    """Events as a standard reader sees them: `data: X`, one line, and an empty line. Anything else is an error."""
    rest = b""
    for chunk in chunks:
        rest += chunk
        while b"\n\n" in rest:
            block, rest = rest.split(b"\n\n", 1)
            text = block.decode()
            assert text.startswith("data: "), text
            assert "\n" not in text, text
            yield time.monotonic(), text.removeprefix("data: ")
    assert not rest, rest


def texts(events: Iterable[tuple[float, str]]) -> list[dict[str, Any]]:
    """The choices of a stream that must end in exactly one [DONE]."""
    data = [item for _, item in events]
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return [choice for item in data[:-1] for choice in json.loads(item)["choices"]]


def wait_for(condition: Callable[[], bool], within_s: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def same_as_solo(answer: Answer, solo: Answer) -> None:
    """Equal ids, but that a near-tie of the solo run may go either way: what follows it is not compared."""
    for i, (mine, theirs) in enumerate(itertools.zip_longest(answer.ids, solo.ids)):
        if mine == theirs:
            continue
        if mine is not None and theirs is not None and i < len(solo.gaps) and solo.gaps[i] < NEAR_TIE:
            print(f"near-tie at {i}: {mine} for {theirs}, gap {solo.gaps[i]:.1e}")
            return
        raise AssertionError(f"differs at token {i}: {answer.ids} is not {solo.ids}")


def _answer(choice: dict[str, Any], cached_tokens: int) -> Answer:
    gaps: list[float] = []
    for best in (choice["logprobs"] or {}).get("top_logprobs", []):
        top = sorted(best.values(), reverse=True)
        gaps.append(top[0] - top[1] if len(top) > 1 else float("inf"))
    return Answer(choice["token_ids"], choice["text"], choice["finish_reason"], cached_tokens, gaps)
