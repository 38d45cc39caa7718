"""Options of a runner: each has an effect, or is said to have none."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from steelyard.checkpoint.find import open_checkpoint
from steelyard.runner import start
from steelyard.runner.options import GPU_ONLY, RunnerOptions
from tests import tiny_model

GIVEN: dict[str, Any] = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "max_num_seqs": 2}


class Watched(RunnerOptions):
    """Options that note which of them are read."""

    read: set[str]

    def __getattribute__(self, name: str) -> Any:
        Watched.read.add(name)
        return super().__getattribute__(name)


def test_an_option_that_a_cpu_s_start_does_not_read_is_said_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(tiny_model.write(tmp_path / "tiny")))
    Watched.read = set()
    monkeypatch.setattr(start, "say_unused", lambda options: None)
    for sizes in ({"num_gpu_blocks_override": 4}, {"kv_cache_memory_bytes": 2**20}):
        start.start_torch_runner(checkpoint, Watched(**GIVEN, **sizes, whole_prompts=True))
    assert {f.name for f in fields(RunnerOptions)} - Watched.read == GPU_ONLY.keys() | {"serves"}


def test_each_is_said_in_one_line_and_only_where_it_was_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(str(tiny_model.write(tmp_path / "tiny")))
    said = {}
    for given in ({}, {"kernel_cache": str(tmp_path / "kernels")}, {"enforce_eager": True}):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            start.start_runner(checkpoint, RunnerOptions(**GIVEN, num_gpu_blocks_override=4, **given))
        said[" ".join(given)] = [record.getMessage() for record in caplog.records]
    assert said == {
        "": [],
        "kernel_cache": ["--kernel-cache is not used: kernels are compiled for GPUs, and this model runs on a CPU"],
        "enforce_eager": [
            "--enforce-eager is not used: CUDA graphs are captured on GPUs, and this model runs on a CPU"
        ],
    }
    assert not (tmp_path / "kernels").exists()
