"""What the HTTP server costs: its streams against a bare event stream on the same stack, in the same run.

    python benchmarks/server.py [--streams 256] [--tokens 200] [--step-ms 40] [--fronts 1,2] [--model smollm2]

Both sides run on this machine: uvicorn with the same loop and parser; a raw ASGI app that sends as many events of
about the same size, one each `step-ms`; and `steelyard serve --script`, whose engine makes a token a stream in such a
step. Printed as JSON, for each:

    paced      one event a token: CPU microseconds an event by process, and their ratio to the echo's
    flat_out   no pause between steps: events and tokens a second. Deltas of one reader that are ready together are one
               event there, so tokens are compared with the echo's events
    first_s    the median time to the first event, paced, from one stream at a time: `added_first_s` to the echo's

On a busy machine only the ratios within one run mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from steelyard.core.environment import environment

_ECHO = """
import asyncio, sys, uvicorn
EVENT = b'data: {"id":"cmpl-' + b"0" * 32 + b'","object":"text_completion","created":1,"model":"m","choices":' \\
    b'[{"index":0,"text":" a","logprobs":null,"finish_reason":null}]}\\n\\n'
STEP_S = float(sys.argv[2]) / 1e3
async def app(scope, receive, send):
    await receive()
    clock = asyncio.get_running_loop().time
    ends = clock()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(int(sys.argv[1])):
        if STEP_S:
            ends += STEP_S
            await asyncio.sleep(ends - clock())
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n"})
class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)
Server(uvicorn.Config(app, port=0, loop="uvloop", http="httptools", lifespan="off", access_log=False,
    log_level="error")).run()
"""


async def one_stream(port: int, body: bytes) -> tuple[float, int]:
    """(seconds to the first event, events) of one request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    began = time.perf_counter()
    writer.write(head.encode() + body)
    first, num_events, last = 0.0, 0, b""
    while chunk := await reader.read(65536):
        data = last + chunk
        num_events += data.count(b"data: {")
        last = data[data.rfind(b"\n") + 1 :]
        if num_events and not first:
            first = time.perf_counter() - began
    writer.close()
    return first, num_events


async def round_of(port: int, body: bytes, num_streams: int) -> dict[str, float]:
    """All streams at once: events a second and the median time to the first event."""
    began = time.perf_counter()
    found = await asyncio.gather(*(one_stream(port, body) for _ in range(num_streams)))
    seconds = time.perf_counter() - began
    num_events = sum(count for _, count in found)
    return {
        "events_per_s": num_events / seconds,
        "events": num_events,
        "first_s": statistics.median(f for f, _ in found),
    }


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def cpu_s(pid: int) -> float:
    """User and system time of a process's threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(port: int, body: bytes, pids: dict[str, list[int]], args: argparse.Namespace) -> dict[str, float]:
    """Medians over rounds of all streams at once, with the CPU time an event of each kind of process."""
    asyncio.run(round_of(port, body, 4))
    rounds = []
    for _ in range(args.rounds):
        before = {kind: sum(map(cpu_s, found)) for kind, found in pids.items()}
        one = asyncio.run(round_of(port, body, args.streams))
        num_tokens = args.streams * args.tokens
        one |= {"tokens_per_s": one["events_per_s"] * num_tokens / one["events"], "tokens": num_tokens}
        for kind, found in pids.items():
            one[f"{kind}_us_a_token"] = (sum(map(cpu_s, found)) - before[kind]) / num_tokens * 1e6
        rounds.append(one)
    firsts = [asyncio.run(round_of(port, body, 1))["first_s"] for _ in range(args.rounds)]
    return median_of(rounds) | {"first_s": statistics.median(firsts)}


def ended(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    process.wait(60)


def measure_echo(args: argparse.Namespace, step_ms: float) -> dict[str, float]:
    command = [sys.executable, "-c", _ECHO, str(args.tokens), str(step_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        return measure(int(process.stdout.readline()), b"{}", {"http": [process.pid]}, args)
    finally:
        ended(process)


def measure_server(args: argparse.Namespace, step_ms: float, num_fronts: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        answer = {"eos_token_id": 2, "default": [args.token] * args.tokens, "step_ms": step_ms}
        script.write_text(json.dumps(answer))
        command = [sys.executable, "-m", "steelyard.cli.main", "serve", args.model, "--port", "0"]
        command += ["--script", str(script), "--max-num-seqs", str(args.streams)]
        command += ["--api-server-count", str(num_fronts)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"http://[\d.]+:(\d+)", line):
                    body = {"prompt": [5], "max_tokens": args.tokens, "ignore_eos": True, "stream": True}
                    pids = processes(process.pid)
                    return measure(int(found[1]), json.dumps(body).encode(), pids, args)
        finally:
            ended(process)
    raise SystemExit("the server did not start")


def processes(pid: int) -> dict[str, list[int]]:
    """The engine's process, and those that do HTTP."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    engine = [child for child in children if b"steelyard.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return {"http": [pid, *(child for child in children if child not in engine)], "engine": engine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and vocabulary are used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="events of a stream")
    parser.add_argument("--step-ms", type=float, default=40.0, help="of the paced runs")
    parser.add_argument("--fronts", default="1,2", help="numbers of front ends to run with")
    parser.add_argument("--token", type=int, default=260, help="the id that is answered")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "environment": environment(),
        "streams": args.streams,
        "tokens_a_stream": args.tokens,
        "step_ms": args.step_ms,
    }
    for kind, step_ms in (("paced", args.step_ms), ("flat_out", 0.0)):
        result[kind] = {"echo": measure_echo(args, step_ms)}
        for num_fronts in map(int, args.fronts.split(",")):
            echo, server = result[kind]["echo"], measure_server(args, step_ms, num_fronts)
            server["tokens_to_echo_events"] = server["tokens_per_s"] / echo["events_per_s"]
            server["echo_cpu_to_http_cpu"] = echo["http_us_a_token"] / server["http_us_a_token"]
            server["added_first_s"] = server["first_s"] - echo["first_s"]
            result[kind][f"fronts_{num_fronts}"] = server
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
