"""SmolLM2 from its GGUF file, against transformers on the weights that the gguf library dequantises."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from steelyard.cache.manager import CacheManager
from steelyard.checkpoint.entry import Checkpoint
from steelyard.checkpoint.find import open_checkpoint
from steelyard.core.sampling import SamplingParams
from steelyard.llm import LLM
from steelyard.runner.options import RunnerOptions
from steelyard.runner.start import start_runner
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.clock import VirtualClock
from tests.equality.llama_rig import Ran, Watched, check_greedy, request


def oracle_of(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """transformers' model with every tensor read by the library that owns the format."""
    raw = {t.name: t for t in gguf.GGUFReader(checkpoint.path).tensors}
    weights = {}
    for name, entry in checkpoint.tensors.items():
        tensor = raw[entry.source_name]
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(entry.shape)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = 9 if "q_proj" in name else 3
            weight = weight.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(weight.shape)
        weights[name] = torch.from_numpy(np.ascontiguousarray(weight))
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


@pytest.mark.slow
def test_smollm2_equals_transformers_chunked_batched_and_from_the_prefix_cache() -> None:
    checkpoint = open_checkpoint("smollm2")
    oracle = oracle_of(checkpoint)
    runner = start_runner(checkpoint, RunnerOptions(dtype="float32", num_gpu_blocks_override=64, max_num_seqs=4))
    scheduler = Scheduler(runner.caps, CacheManager(runner.caps), SchedulerOptions(max_num_batched_tokens=24))
    simulation = Watched(scheduler, runner, VirtualClock())
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(100, 40000, (32,), generator=generator).tolist()
    tails = [torch.randint(100, 40000, (n,), generator=generator).tolist() for n in (5, 16, 1)]
    ran = Ran({}, scheduler, simulation)
    for wave in (tails[:2], tails[2:]):
        for tail in wave:
            ran.requests.append(request(f"r{len(ran.requests)}", common + tail, 12))
            simulation.add(ran.requests[-1])
        simulation.run()
    ran.outputs = simulation.outputs
    assert check_greedy(oracle, ran) <= 1
    assert scheduler.counters.prefill_chunks > 3 and scheduler.counters.prefix_hits_tokens >= 32


TEXT = """The steelyard is a balance with arms of unequal length. The thing to be weighed hangs from the short arm, and
a counterweight slides along the long one until both sides are level; where it rests, the scale engraved in the beam
says what the thing weighs. It needs only one weight, and so merchants of Rome carried it from market to market."""


@pytest.mark.slow
@pytest.mark.parametrize("budget", [4, 64], ids=["packed", "bfloat16"])
def test_smollm2_with_packed_or_narrow_weights_predicts_as_in_float32(budget: int) -> None:
    """Steps of four tokens go through the packed weights, longer ones through the bfloat16 form."""
    found = []
    for dtype in ("float32", "bfloat16"):
        llm = LLM("smollm2", dtype=dtype, max_num_batched_tokens=budget, num_gpu_blocks_override=16)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        output = llm.generate([TEXT], sampling)[0]
        found.append([p for p in output.prompt_logprobs or () if p is not None])
    exact, narrow = found
    assert len(exact) > 70
    same = sum(a.top[0][0] == b.top[0][0] for a, b in zip(exact, narrow, strict=True)) / len(exact)
    perplexities = [math.exp(-sum(p.logprob for p in some) / len(some)) for some in found]
    print(f"top-1 agreement {same:.3f}, perplexity {perplexities[0]:.2f} in float32, {perplexities[1]:.2f} narrow")
    assert same >= 0.93 and abs(perplexities[1] / perplexities[0] - 1) < 0.02
