"""One engine in a process of its own, driven by lines of JSON: the other side of benchmarks/cpu.py.

    python benchmarks/cpu_workers.py ENGINE MODEL_FILE THREADS
    stdin   {"rows": 4, "prompt_len": 64, "steps": 32}
    stdout  {"prefill": [wall_s, cpu_s], "decode": [wall_s, cpu_s]}      decode: `steps` tokens of each row

`rows` prompts of random tokens are computed to their first token, then all rows decode together, greedily. CPU time is
of all the process's threads. Engines: steelyard (--dtype auto), steelyard-float32, transformers, transformers-bfloat16,
llama.cpp (in a Python that has llama-cpp-python; nothing else is imported there).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

CONTEXT_TOKENS = 1280
MAX_ROWS = 16
VOCABULARY = range(100, 40000)
Times = list[float]


class Worker(Protocol):
    """An engine that has loaded its model."""

    def prefill(self, prompts: list[list[int]], steps: int) -> None:
        """Compute all prompts and one token after each."""
        ...

    def decode(self, steps: int) -> None:
        """`steps` more tokens of every row."""
        ...


class Steelyard:
    """The whole engine without its sockets: scheduler, cache, runner."""

    def __init__(self, path: str, threads: int, dtype: str) -> None:
        import torch

        from steelyard.config import EngineConfig
        from steelyard.engine.build import build_engine

        torch.set_num_threads(threads)
        config = EngineConfig(model=path, dtype=dtype, enable_prefix_caching=False, num_gpu_blocks_override=1280)
        self.engine = build_engine(config)
        self.left: dict[str, int] = {}

    def prefill(self, prompts: list[list[int]], steps: int) -> None:
        from steelyard.core.sampling import SamplingParams
        from steelyard.wire.messages import Accepted, Submit

        sampling = SamplingParams(temperature=0.0, max_tokens=1 + steps, ignore_eos=True)
        self.left = {}
        for number, prompt in enumerate(prompts):
            answer = self.engine.submit(Submit(f"row{number}", prompt, sampling))
            assert isinstance(answer, Accepted), answer
            self.left[f"row{number}"] = 1 + steps
        while any(left > steps for left in self.left.values()):
            self._step()

    def decode(self, steps: int) -> None:
        while self.engine.has_work:
            self._step()
        assert not any(self.left.values()), self.left

    def _step(self) -> None:
        from steelyard.wire.messages import Deltas

        for message in self.engine.step():
            if isinstance(message, Deltas):
                for item in message.items:
                    self.left[item.id] -= len(item.ids)


class Transformers:
    """The model with its dynamic cache, rows of one length as a plain batch: nothing is padded."""

    def __init__(self, path: str, threads: int, dtype: str) -> None:
        import torch
        import transformers

        from steelyard.checkpoint.find import open_checkpoint
        from steelyard.layers.linear import Target
        from steelyard.models.load import copy_tensor, map_file

        torch.set_num_threads(threads)
        checkpoint = open_checkpoint(path)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config))
        self.torch, self.model = torch, model.to(getattr(torch, dtype)).eval()
        with torch.no_grad():
            weights = model.state_dict()
            for name, entry in checkpoint.tensors.items():
                copy_tensor(entry, map_file(entry.file), Target(weights[name]))
        self.tokens: Any = None
        self.cache: Any = None

    def prefill(self, prompts: list[list[int]], steps: int) -> None:
        self.cache = None
        self._forward(self.torch.tensor(prompts))

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._forward(self.tokens)

    def _forward(self, tokens: Any) -> None:
        with self.torch.inference_mode():
            out = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        self.tokens = out.logits[:, -1].argmax(-1, keepdim=True)


class LlamaCpp:
    """llama.cpp through its C interface, so that rows share a batch; the argmax is numpy's."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp
        import numpy

        self.c, self.np = llama_cpp, numpy
        llama_cpp.llama_backend_init()
        quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self.quiet = quiet
        llama_cpp.llama_log_set(quiet, None)
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CONTEXT_TOKENS * 2, 2048, 512, MAX_ROWS
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp made no context"
        self.num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self.next: list[int] = []
        self.position = 0

    def prefill(self, prompts: list[list[int]], steps: int) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        self.position = 0
        self._forward(prompts)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._forward([[token] for token in self.next])

    def _forward(self, rows: list[list[int]]) -> None:
        batch, last, at = self.batch, [], 0
        for row, tokens in enumerate(rows):
            for i, token in enumerate(tokens):
                batch.token[at], batch.pos[at] = token, self.position + i
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = i == len(tokens) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        assert self.c.llama_decode(self.context, batch) == 0
        self.position += len(rows[0])
        logits = [self.c.llama_get_logits_ith(self.context, i) for i in last]
        self.next = [int(self.np.ctypeslib.as_array(row, shape=(self.num_vocab,)).argmax()) for row in logits]


ENGINES: dict[str, Callable[[str, int], Worker]] = {
    "steelyard": lambda path, threads: Steelyard(path, threads, "auto"),
    "steelyard-float32": lambda path, threads: Steelyard(path, threads, "float32"),
    "transformers": lambda path, threads: Transformers(path, threads, "float32"),
    "transformers-bfloat16": lambda path, threads: Transformers(path, threads, "bfloat16"),
    "llama.cpp": LlamaCpp,
}


def since(begun: Times) -> Times:
    """[wall, CPU of all threads] in seconds since `begun`, which `now` gave."""
    return [end - start for end, start in zip(now(), begun, strict=True)]


def now() -> Times:
    """Clocks of wall and CPU time."""
    return [time.perf_counter(), time.process_time()]


def main() -> None:
    """Load, say so with the time it took, then answer cells until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES, metavar="ENGINE")
    parser.add_argument("path", metavar="MODEL_FILE")
    parser.add_argument("threads", type=int, metavar="THREADS")
    args = parser.parse_args()
    begun = now()
    worker = ENGINES[args.engine](args.path, args.threads)
    print(json.dumps({"load": since(begun)}), flush=True)
    draw = random.Random(1)
    for line in sys.stdin:
        cell = json.loads(line)
        prompts = [draw.choices(VOCABULARY, k=cell["prompt_len"]) for _ in range(cell["rows"])]
        begun = now()
        worker.prefill(prompts, cell["steps"])
        found = {"prefill": since(begun)}
        begun = now()
        worker.decode(cell["steps"])
        found["decode"] = since(begun)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
