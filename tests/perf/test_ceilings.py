"""Measuring gives ceilings that a plan can use; their size is the machine's business."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from steelyard.errors import StartError
from steelyard.perf.ceilings import Sizes, measure, measure_ceiling
from steelyard.plan.costs import Setup, decode
from steelyard.plan.device import ceilings_toml, find_device
from steelyard.plan.formats import weight_format
from steelyard.plan.presets import preset_config
from steelyard.plan.roofline import Roofline
from steelyard.plan.shape import ModelShape

SMALL = Sizes(2**16, 128, 1, 64, 2, 64, 4, 2, 32)


def test_every_ceiling_is_measured_and_a_plan_can_use_them() -> None:
    device = measure(None, SMALL)
    assert device.ceilings is not None
    assert all(math.isfinite(v) and v > 0 for v in dataclasses.astuple(device.ceilings))
    assert device.memory_bytes > 2**28
    shape = ModelShape.from_config(preset_config("smollm2-135m"))
    roofline = Roofline(Setup(shape, device, weight_format("bf16")))
    assert roofline.reach(decode(1, 10)).seconds >= roofline.floor(decode(1, 10)).seconds > 0


def test_a_named_device_keeps_its_datasheet(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("bf16_tflops = 5.0\nbandwidth_gb_per_s = 100.0\nmemory_gib = 16.0\n")
    device = measure(str(path), SMALL)
    assert (device.bf16_flops, device.bandwidth) == (5e12, 1e11)
    assert device.ceilings is not None


def test_a_device_that_is_not_here_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(StartError, match="--device"):
        measure("H300", SMALL)
    if not torch.cuda.is_available():
        with pytest.raises(StartError, match="--device L4 is not in this machine"):
            measure("L4", SMALL)


def test_what_was_measured_is_read_back_from_its_file(tmp_path: Path) -> None:
    device = measure(None, SMALL)
    path = tmp_path / "mine.toml"
    path.write_text(ceilings_toml(device))
    again = find_device(str(path))
    assert again.ceilings is not None and device.ceilings is not None
    assert dataclasses.astuple(again.ceilings) == pytest.approx(dataclasses.astuple(device.ceilings), rel=1e-5)
    assert (again.name, again.memory_bytes) == (device.name, device.memory_bytes)
    assert again.bandwidth == pytest.approx(device.bandwidth)


def test_kernels_are_held_against_the_same_probes() -> None:
    seen = measure_ceiling(torch.device("cpu"), torch.float32, SMALL)
    assert seen.dtype == "float32"
    assert all(math.isfinite(v) and v > 0 for v in (seen.matmul_flops, seen.read_bandwidth, seen.copy_bandwidth))


@pytest.mark.gpu
def test_ceilings_of_a_gpu_lie_under_its_datasheet() -> None:
    device = measure()
    ceilings = device.ceilings
    assert ceilings is not None
    assert 0.4 < ceilings.matmul_flops / device.bf16_flops <= 1.0
    assert 0.6 < ceilings.copy_bandwidth / device.bandwidth <= 1.0
    assert 0.4 < ceilings.weights_bandwidth / device.bandwidth <= 1.0
