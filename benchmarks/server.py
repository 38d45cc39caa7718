"""What the HTTP server costs: its streams against a bare event stream on the same stack, in the same run.

    python benchmarks/server.py [--streams 64] [--tokens 400] [--model smollm2]

Both sides run on this machine: uvicorn with the same loop and parser, a raw ASGI app that sends as many events of
about the same size, and `steelyard serve --script`, whose engine answers at once. Printed as JSON: events a second,
the ratio, and the added time to the first event. Run it alone; medians of several rounds. Deltas of one reader that
are ready together are one event, so tokens are compared with the echo's events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_ECHO = """
import sys, uvicorn
EVENT = b'data: {"id":"cmpl-' + b"0" * 32 + b'","object":"text_completion","created":1,"model":"m","choices":' \\
    b'[{"index":0,"text":" a","logprobs":null,"finish_reason":null}]}\\n\\n'
async def app(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(int(sys.argv[1])):
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


def measure(port: int, body: bytes, args: argparse.Namespace) -> dict[str, float]:
    asyncio.run(round_of(port, body, 4))
    return median_of([asyncio.run(round_of(port, body, args.streams)) for _ in range(args.rounds)])


def ended(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    process.wait(30)


def measure_echo(args: argparse.Namespace) -> dict[str, float]:
    process = subprocess.Popen([sys.executable, "-c", _ECHO, str(args.tokens)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        return measure(int(process.stdout.readline()), b"{}", args)
    finally:
        ended(process)


def measure_server(args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps({"eos_token_id": 2, "default": [args.token] * args.tokens}))
        command = [sys.executable, "-m", "steelyard.cli.main", "serve", args.model, "--port", "0"]
        process = subprocess.Popen([*command, "--script", str(script)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"http://[\d.]+:(\d+)", line):
                    body = {"prompt": [5], "max_tokens": args.tokens, "ignore_eos": True, "stream": True}
                    return measure(int(found[1]), json.dumps(body).encode(), args)
        finally:
            ended(process)
    raise SystemExit("the server did not start; its log is above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and vocabulary are used")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="events of a stream")
    parser.add_argument("--token", type=int, default=260, help="the id that is answered")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    echo, server = measure_echo(args), measure_server(args)
    tokens_per_s = server["events_per_s"] * args.streams * args.tokens / server["events"]
    result = {
        "streams": args.streams,
        "tokens_a_stream": args.tokens,
        "echo": echo,
        "server": server | {"tokens_per_s": tokens_per_s},
        "tokens_per_echo_event": tokens_per_s / echo["events_per_s"],
        "added_first_s": server["first_s"] - echo["first_s"],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
