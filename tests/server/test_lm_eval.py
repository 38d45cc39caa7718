"""lm-eval's own local-completions model against a running server, on the task under benchmarks/lm_eval: no network.

Its numbers are those of transformers on the same weights: the sum of each choice's log-probabilities, and what is best.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny_model
from tests.cases.rig import Server

ROOT = Path(__file__).parent.parent.parent
TASK = "steelyard_sea"
DOCS = [json.loads(line) for line in (ROOT / "benchmarks/lm_eval/sea.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(
        model, ["--dtype", "float32", "--served-model-name", "tiny"], tmp_path_factory.mktemp("log") / "log"
    )
    yield server
    assert server.stop() == 0


@torch.inference_mode()
def sums(model: Path) -> list[list[float]]:
    """The log-probability of each choice of each document by transformers, its context encoded as lm-eval does."""
    tokenizer, oracle = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    found = []
    for doc in DOCS:
        context = tokenizer.encode(doc["text"], add_special_tokens=False)
        row = []
        for choice in doc["choices"]:
            whole = tokenizer.encode(f"{doc['text']} {choice}", add_special_tokens=False)
            logprobs = oracle(torch.tensor([whole])).logits[0].log_softmax(-1)
            row.append(sum(logprobs[i - 1, whole[i]].item() for i in range(len(context), len(whole))))
        found.append(row)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["its own", "the server's"])
def test_lm_eval_gets_the_log_probabilities_of_the_model(
    model: Path, server: Server, tmp_path: Path, tokenizer: str
) -> None:
    args: dict[str, Any] = {
        "model": "tiny",
        "base_url": f"{server.url}/v1/completions",
        "num_concurrent": 3,
        "max_retries": 1,
    }
    args |= {"tokenizer": model} if tokenizer == "its own" else {"tokenizer_backend": "remote"}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", TASK]
    command += ["--include_path", "benchmarks/lm_eval", "--output_path", str(tmp_path), "--log_samples"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in args.items())]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    [path] = tmp_path.rglob("samples_*.jsonl")
    samples = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda s: s["doc_id"])
    expected = sums(model)
    for sample, row in zip(samples, expected, strict=True):
        assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(row, abs=1e-3)
    [results] = tmp_path.rglob("results_*.json")
    best = [max(range(3), key=row.__getitem__) == doc["answer"] for row, doc in zip(expected, DOCS)]
    assert json.loads(results.read_text())["results"][TASK]["acc,none"] == pytest.approx(sum(best) / len(best))
