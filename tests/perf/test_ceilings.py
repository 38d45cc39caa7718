"""Measuring gives ceilings that a plan can use; their size is the machine's business."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from steelyard.errors import StartError
from steelyard.kernels import cpu_linear
from steelyard.perf import ceilings
from steelyard.perf.ceilings import Sizes, measure, measure_ceiling
from steelyard.perf.timing import best_ms, own_stream
from steelyard.plan.costs import Setup, decode
from steelyard.plan.device import Ceilings, ceilings_toml, find_device
from steelyard.plan.formats import weight_format
from steelyard.plan.presets import preset_config
from steelyard.plan.roofline import Roofline
from steelyard.plan.shape import ModelShape


@pytest.fixture(autouse=True)
def _no_longer_than_a_test_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "PRODUCT_BUDGET_S", 0.02)
    monkeypatch.setattr(ceilings, "best_ms", lambda call, budget_s=0.0: best_ms(call, 0.02))


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


def test_a_processor_is_measured_in_each_dtype_that_the_server_computes_in() -> None:
    """bf16 names what 16-bit weights run at, and the best of every probe stands under the floor."""
    where = torch.device("cpu")
    device = ceilings._measure_processor(where, SMALL)
    seen = device.ceilings
    assert seen is not None and device.fp32_flops is not None
    assert device.bf16_flops >= max(seen.matmul_flops, seen.attention_flops, device.fp32_flops)
    assert device.bandwidth >= max(seen.weights_bandwidth, seen.kv_bandwidth, seen.copy_bandwidth)
    assert f"fp32_tflops = {device.fp32_flops / 1e12!r}" in ceilings_toml(device)


def test_products_of_a_processor_go_the_servers_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    product = cpu_linear.product

    def watch(x: torch.Tensor, weight: cpu_linear.Weight, bias: torch.Tensor | None) -> torch.Tensor:
        taken.append(cpu_linear.dtype_of(weight))
        return product(x, weight, bias)

    monkeypatch.setattr(cpu_linear, "product", watch)
    ceilings._measure_processor(torch.device("cpu"), SMALL)
    assert set(taken) == {torch.bfloat16, torch.float32}


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings.os, "getloadavg", lambda: (100.0, 0.0, 0.0))
    assert "busy (load average 100.0" in str(ceilings.busy_with_others())
    monkeypatch.setattr(ceilings.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert ceilings.busy_with_others() is None


def test_a_run_on_a_busy_machine_or_with_two_answers_carries_that_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bandwidth of 1 GB/s and then of 3, the rest alike."""
    one = Ceilings(1e12, 1e12, 1e9, 1e9, 1e9, 1e-6)
    answers = [one, dataclasses.replace(one, kv_bandwidth=3e9, weights_bandwidth=1.1e9)]
    monkeypatch.setattr(ceilings, "_probed", lambda *_: answers.pop(0))
    monkeypatch.setattr(ceilings, "busy_with_others", lambda: "the machine was busy")
    device = measure(None, SMALL)
    assert device.doubts == ("the machine was busy", "kv_gb_per_s came out as 1 and as 3 in one run")
    assert device.ceilings is not None
    assert (device.ceilings.kv_bandwidth, device.ceilings.weights_bandwidth) == (3e9, 1.1e9)
    path = tmp_path / "mine.toml"
    path.write_text(ceilings_toml(device))
    assert find_device(str(path)).doubts == device.doubts


def test_kernels_are_held_against_the_same_probes() -> None:
    seen = measure_ceiling(torch.device("cpu"), torch.float32, SMALL)
    assert seen.dtype == "float32"
    assert all(math.isfinite(v) and v > 0 for v in (seen.matmul_flops, seen.read_bandwidth, seen.copy_bandwidth))


@pytest.mark.gpu
def test_ceilings_of_a_gpu_lie_under_its_datasheet() -> None:
    device = measure()
    seen = device.ceilings
    assert seen is not None
    assert 0.4 < seen.matmul_flops / device.bf16_flops <= 1.0
    assert 0.6 < seen.copy_bandwidth / device.bandwidth <= 1.0
    assert 0.4 < seen.weights_bandwidth / device.bandwidth <= 1.0
    with own_stream(torch.device("cuda")):
        read = measure_ceiling(torch.device("cuda"), torch.bfloat16).read_bandwidth
    assert 0.8 < read / device.bandwidth <= 1.0
