"""Tiny random models on disk, our engine without its sockets, and transformers' verdict on what it generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from steelyard.cache.manager import CacheManager
from steelyard.checkpoint.find import open_checkpoint
from steelyard.core.request import Request
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import StepPlan
from steelyard.runner.options import RunnerOptions
from steelyard.runner.runner import TorchRunner
from steelyard.runner.start import start_runner
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.clock import VirtualClock
from steelyard.sim.simulation import Simulation

VOCAB = 211
TIE = 1e-4  # logits closer than this may be ordered either way by a sum taken in another order

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def tiny_llama(
    folder: Path, *, tied: bool = False, rope: str = "default", seed: int = 0, **fields: Any
) -> PreTrainedModel:
    """A random Llama with grouped heads, saved to `folder`; wide weights keep the best two logits apart.

    `fields` are put over its configuration's.
    """
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
    }  # fmt: skip
    config = LlamaConfig(
        tie_word_embeddings=tied, rope_parameters=ROPES[rope], bos_token_id=None, eos_token_id=None, **(sizes | fields)
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Cell:
    """One way of running the same requests."""

    budget: int = 512
    block_size: int = 16
    num_blocks: int = 128
    max_rows: int = 8
    overlap: bool = False
    caching: bool = True
    backend: str = "cpu"
    max_model_len: int | None = None
    swap_space_bytes: int = 0
    device: str = "cpu"


class Watched(Simulation):
    """Remembers how many steps were ever in flight at once."""

    max_in_flight = 0

    def launch(self) -> StepPlan | None:
        plan = super().launch()
        self.max_in_flight = max(self.max_in_flight, self.scheduler.in_flight)
        return plan


@dataclass
class Ran:
    """What came out, and the proof of what happened on the way."""

    outputs: dict[tuple[str, int], list[int]]
    scheduler: Scheduler
    simulation: Watched
    max_rows_in_step: int = 0
    mixed_steps: int = 0
    requests: list[Request] = field(default_factory=list)


def runner_of(folder: Path, cell: Cell, **options: Any) -> TorchRunner:
    torch.set_num_threads(1)
    return start_runner(
        open_checkpoint(str(folder)),
        RunnerOptions(
            dtype="float32",
            device=cell.device,
            max_num_seqs=cell.max_rows,
            max_num_batched_tokens=cell.budget,
            block_size=cell.block_size,
            num_gpu_blocks_override=cell.num_blocks,
            overlap=cell.overlap,
            backend=cell.backend,
            max_model_len=cell.max_model_len,
            swap_space_bytes=cell.swap_space_bytes,
            **options,
        ),
    )


def run(folder: Path, cell: Cell, requests: list[Request], late: list[Request] | None = None) -> Ran:
    """Serve `requests`, then `late` ones when the first have ended; invariants are checked after every step."""
    runner = runner_of(folder, cell)
    scheduler = Scheduler(runner.caps, CacheManager(runner.caps, cell.caching), SchedulerOptions(overlap=cell.overlap))
    ran = Ran({}, scheduler, Watched(scheduler, runner, VirtualClock()))
    for wave in (requests, late or []):
        for request in wave:
            ran.simulation.add(request)
            ran.requests.append(request)
        while scheduler.has_work:
            before = len(ran.simulation.plans)
            assert ran.simulation.step(), "stuck"
            scheduler.check()
            for plan in ran.simulation.plans[before:]:
                ran.max_rows_in_step = max(ran.max_rows_in_step, len(plan.work))
                counts = {w.num_new > 1 for w in plan.work}
                ran.mixed_steps += counts == {True, False}
    ran.outputs = ran.simulation.outputs
    return ran


def request(name: str, prompt: list[int], max_tokens: int = 24, *, index: int = 0, **fields: Any) -> Request:
    fork_of = fields.pop("fork_of", None)
    params = SamplingParams(max_tokens=max_tokens, seed=1234 + index, **({"temperature": 0.0} | fields))
    return Request(name, prompt, params, 0, index=index, fork_of=fork_of)


def prompts(lens: tuple[int, ...], shared: int = 0, seed: int = 5) -> list[list[int]]:
    """Random prompts of the given lengths, the first `shared` tokens the same in all."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(0, VOCAB, (shared,), generator=generator).tolist()
    return [(common + torch.randint(0, VOCAB, (n,), generator=generator).tolist())[:n] for n in lens]


@torch.inference_mode()
def check_greedy(model: PreTrainedModel, ran: Ran, tie: float = TIE) -> int:
    """Every generated token is the argmax of transformers' logits after the same tokens, near-ties of its best two
    excepted; returns how many of those there were.

    Judging each token after our own earlier ones is what `generate` does, and goes on after a tie.
    """
    ties = 0
    for req in ran.requests:
        output = ran.outputs[req.key]
        assert output and req.reason is not None and req.reason.value == "length", req
        tokens = torch.tensor([req.tokens[: req.prompt_len] + output])
        logits = model(tokens).logits[0, req.prompt_len - 1 : -1]
        best = logits.topk(2, dim=-1)
        for at, token in enumerate(output):
            if token == int(best.indices[at, 0]):
                continue
            gap = float(best.values[at, 0] - logits[at, token])
            assert gap < tie, f"{req.key} token {at}: {token} is {gap:.4f} below {int(best.indices[at, 0])}"
            ties += 1
    if ties:
        print(f"{ties} near-ties of the reference's best two")
    return ties
