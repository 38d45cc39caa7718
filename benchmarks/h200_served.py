"""A workload over HTTP beside the same workload offline: what serving costs. Run: python3 benchmarks/h200_served.py OUT

    steelyard serve CONFIG --load-format dummy --skip-tokenizer-init       then       steelyard bench serve (token ids)

All requests are in flight at once, as offline. Rows go to OUT/served.json, the client's whole report beside them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from steelyard.perf.workloads import find_case, write_config

PORT = 8077
URL = f"http://127.0.0.1:{PORT}"
CASE = "short-short 256/128"
STEELYARD = [sys.executable, "-m", "steelyard.cli.main"]


def wait_until_ready(server: subprocess.Popen[bytes], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError("the server ended before it was ready")
        try:
            with urllib.request.urlopen(f"{URL}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server did not become ready")


def serve_and_load(model: str, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One server, one load; the client's report is kept in OUT and its headline returned."""
    folder = out / model
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(model, folder)
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--port", str(PORT), "--max-model-len", "8192"]
    server = subprocess.Popen([*STEELYARD, "serve", str(config), *flags, *args.serve.split()])
    try:
        wait_until_ready(server, args.start_limit)
        vocab_size = json.loads((Path(config) / "config.json").read_text())["vocab_size"]
        lens = find_case(CASE).lens[: args.requests]
        command = [*STEELYARD, "bench", "serve", "--base-url", URL, "--prompt-kind", "ids", "--ignore-eos", "--json"]
        command += ["--vocab-size", str(vocab_size - 1000), "--num-prompts", str(len(lens))]
        command += ["--random-input-len", str(lens[0][0]), "--random-output-len", str(lens[0][1])]
        command += ["--max-concurrency", str(len(lens)), "--client-processes", str(args.clients), "--warmup", "64"]
        command += ["--extra-body", '{"temperature": 1.0}', *args.bench.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.load_limit)
        (out / f"{model}-client.json").write_text(done.stdout)
        (out / f"{model}-client.log").write_text(done.stderr)
        return {"model": model, "case": CASE, "status": done.returncode}
    finally:
        server.terminate()
        server.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="qwen3-0.6b,llama3-8b")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--serve", default="--gpu-memory-utilization 0.85", help="further flags of the server")
    parser.add_argument("--bench", default="", help="further flags of the client")
    parser.add_argument("--start-limit", type=float, default=60)
    parser.add_argument("--load-limit", type=float, default=60)
    args = parser.parse_args()
    rows = []
    for model in args.models.split(","):
        try:
            rows.append(serve_and_load(model, args.out, args))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            rows.append({"model": model, "case": CASE, "failed": str(error)})
        print(rows[-1], flush=True)
        (args.out / "served.json").write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
