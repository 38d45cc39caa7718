"""SmolLM2 from its GGUF file, against transformers on the weights that it dequantises by its own means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llama_rig import Ran, Watched, check_greedy, request
from transformers import AutoModelForCausalLM

from steelyard.cache.manager import CacheManager
from steelyard.checkpoint.find import open_checkpoint
from steelyard.runner.options import RunnerOptions
from steelyard.runner.start import start_runner
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.clock import VirtualClock


@pytest.mark.slow
def test_smollm2_equals_transformers_chunked_batched_and_from_the_prefix_cache() -> None:
    checkpoint = open_checkpoint("smollm2")
    path = Path(checkpoint.path)
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
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
