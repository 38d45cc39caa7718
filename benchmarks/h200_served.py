"""A workload over HTTP beside the same workload offline: what serving costs. Run: python3 benchmarks/h200_served.py OUT

    steelyard serve CONFIG --load-format dummy --skip-tokenizer-init       then       steelyard bench serve (token ids)

All requests are in flight at once, as offline; once for each number of HTTP processes. Rows go to OUT/served.json, the
client's whole reports beside them; `of_offline` is the rate over that of the same case in --offline (h200.py's rows).
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
KEPT = Path(__file__).parent / "results" / "h200.json"


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


def serve_and_load(model: str, fronts: int, args: argparse.Namespace) -> dict[str, Any]:
    """One server, one load; the client's report is kept in OUT and its headline returned."""
    config = write_config(model, args.out / "models")
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--port", str(PORT), "--max-model-len", "8192"]
    flags += ["--api-server-count", str(fronts), *args.serve.split()]
    server = subprocess.Popen([*STEELYARD, "serve", str(config), *flags])
    try:
        wait_until_ready(server, args.start_limit)
        done = subprocess.run(_client(config, args), capture_output=True, text=True, timeout=args.load_limit)
    finally:
        server.terminate()
        server.wait(60)
    name = f"{model}-{fronts}"
    (args.out / f"{name}-client.log").write_text(done.stderr)
    if done.returncode:
        raise RuntimeError(f"bench serve ended with {done.returncode}: {done.stderr[-500:]}")
    (args.out / f"{name}-client.json").write_text(done.stdout)
    return {"model": model, "case": CASE, "fronts": fronts, **headline(json.loads(done.stdout), model, args.offline)}


def _client(config: Path, args: argparse.Namespace) -> list[str]:
    vocab_size = json.loads((config / "config.json").read_text())["vocab_size"]
    lens = find_case(CASE).lens[: args.requests]
    command = [*STEELYARD, "bench", "serve", "--base-url", URL, "--prompt-kind", "ids", "--ignore-eos", "--json"]
    command += ["--vocab-size", str(vocab_size - 1000), "--num-prompts", str(len(lens))]
    command += ["--random-input-len", str(lens[0][0]), "--random-output-len", str(lens[0][1])]
    command += ["--max-concurrency", str(len(lens)), "--client-processes", str(args.clients), "--warmup", "64"]
    return [*command, "--extra-body", '{"temperature": 1.0}', *args.bench.split()]


def headline(report: dict[str, Any], model: str, offline: Path) -> dict[str, Any]:
    """The rate, that of the same case offline, and which gates did not pass."""
    whole = report["summary"]["windows"]["whole run"]
    rows = json.loads(offline.read_text()) if offline.exists() else []
    base = next((r["out_tok_s"] for r in rows if r["model"] == model and r["case"] == CASE), None)
    rate = whole["output_tokens_per_s"]
    return {
        "label": report["label"],
        "seconds": whole["seconds"],
        "out_tok_s": rate,
        "offline_out_tok_s": base,
        "of_offline": base and rate / base,
        "gates": {g["name"]: g["outcome"] for g in report["gates"] if g["outcome"] != "pass"},
        "environment": report["environment"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="qwen3-0.6b,llama3-8b")
    parser.add_argument("--fronts", default="1", help="numbers of HTTP processes to try, each with a server of its own")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--offline", type=Path, default=KEPT, help="rows of h200.py")
    parser.add_argument("--serve", default="--gpu-memory-utilization 0.85", help="further flags of the server")
    parser.add_argument("--bench", default="", help="further flags of the client")
    parser.add_argument("--start-limit", type=float, default=60)
    parser.add_argument("--load-limit", type=float, default=60)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in args.models.split(","):
        for fronts in map(int, args.fronts.split(",")):
            try:
                rows.append(serve_and_load(model, fronts, args))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                rows.append({"model": model, "case": CASE, "fronts": fronts, "failed": str(error)})
            print({k: v for k, v in rows[-1].items() if k != "environment"}, flush=True)
            (args.out / "served.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
