"""Measuring gives ceilings that a plan can use; their size is the machine's business."""

from __future__ import annotations

import dataclasses
import math

import pytest

from steelyard.errors import StartError
from steelyard.perf.ceilings import Sizes, measure
from steelyard.plan.costs import Setup, decode
from steelyard.plan.device import find_device
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


def test_a_named_device_keeps_its_datasheet() -> None:
    device = measure("L4", SMALL)
    assert device.bandwidth == find_device("L4").bandwidth
    assert device.ceilings is not None
    with pytest.raises(StartError, match="--device"):
        measure("H300", SMALL)


@pytest.mark.gpu
def test_ceilings_of_a_gpu_lie_under_its_datasheet() -> None:
    device = measure()
    ceilings = device.ceilings
    assert ceilings is not None
    assert 0.4 < ceilings.matmul_flops / device.bf16_flops <= 1.0
    assert 0.6 < ceilings.copy_bandwidth / device.bandwidth <= 1.0
    assert 0.4 < ceilings.weights_bandwidth / device.bandwidth <= 1.0
