"""What a runner says it can hold is the same for the same options on either start, and is what its pool has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard.checkpoint.find import open_checkpoint
from steelyard.core.step import RunnerCaps
from steelyard.runner.options import RunnerOptions
from steelyard.runner.start import start_torch_runner
from steelyard.runner.start_device import start_device_runner
from tests import tiny_model


@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_cache_dtype": "fp8"}, {"kv_window": 24}, {"overlap": False}, {"swap_space_bytes": 2**20}],
    ids=str,
)  # fmt: skip
def test_both_starts_say_the_same_of_the_same_options(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(str(tiny_model.write(tmp_path / "tiny")))
    given: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "backend": "reference", "max_num_seqs": 3, "max_num_batched_tokens": 40,
        "block_size": 16, "num_gpu_blocks_override": 9, "max_model_len": 64, "overlap": True,
    }  # fmt: skip
    options = RunnerOptions(**{**given, **changes})
    on_cpu = start_torch_runner(checkpoint, options)
    by_device = start_device_runner(checkpoint, options)
    assert without_bandwidth(by_device.caps) == without_bandwidth(on_cpu.caps)
    caps = on_cpu.caps
    assert caps.num_blocks == (9,) and caps.max_rows == 3 and caps.max_batched_tokens == 40
    assert caps.overlaps != caps.checks_drafts and caps.overlaps == changes.get("overlap", True)
    assert bool(caps.num_host_blocks) == bool(caps.host_bandwidth) == ("swap_space_bytes" in changes)
    assert ("fp8" in caps.kv_layout) == ("kv_cache_dtype" in changes)
    assert ("window 24" in caps.kv_layout) == ("kv_window" in changes)


def without_bandwidth(caps: RunnerCaps) -> dict[str, Any]:
    return {name: getattr(caps, name) for name in caps.__dataclass_fields__ if name != "host_bandwidth"}
