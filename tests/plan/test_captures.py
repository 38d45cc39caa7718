"""What a plan says is captured is what the runner captures, and the sizes a plan assumes are those of `serve`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.checkpoint.find import open_checkpoint
from steelyard.plan.defaults import BY_DEVICE, Defaults
from steelyard.plan.device import find_device
from steelyard.plan.models import find_model
from steelyard.plan.planner import Options, make_plan
from steelyard.runner.options import RunnerOptions, resolve_limits
from steelyard.runner.start_device import start_device_runner
from tests.equality.llama_rig import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captures")
    tiny_llama(path)
    return path


@pytest.mark.parametrize(("seqs", "tokens"), [(3, 20), (11, 64), (40, 200)])
@pytest.mark.parametrize("eager", [False, True])
def test_the_runner_captures_what_a_plan_counts(folder: Path, seqs: int, tokens: int, eager: bool) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "enforce_eager": eager}
    given = RunnerOptions(device="cpu", dtype="float32", backend="reference", num_gpu_blocks_override=32, **sizes)
    runner: Any = start_device_runner(open_checkpoint(str(folder)), given)
    buckets = make_plan(find_model(str(folder)), Options(find_device("H200"), **sizes)).buckets
    assert runner._machine.buckets == buckets
    assert len(runner._machine.graphs) == buckets.num_graphs
    assert (buckets.num_graphs == 0) == eager


def test_a_plan_assumes_what_the_runner_takes_where_no_flag_is_given() -> None:
    for kind, defaults in BY_DEVICE.items():
        limits = resolve_limits(RunnerOptions(), torch.device(kind), 1 << 20)
        found = limits.max_rows, limits.max_batched_tokens, limits.block_size
        assert found == (defaults.max_num_seqs, defaults.max_num_batched_tokens, defaults.block_size)
    options = Options(find_device("H200"))
    planned = {f.name: getattr(options, f.name, options.share) for f in fields(Defaults)}
    assert planned == {f.name: getattr(BY_DEVICE["cuda"], f.name) for f in fields(Defaults)}
