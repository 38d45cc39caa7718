"""Setups that several tests of the planner share."""

from __future__ import annotations

from steelyard.plan.calibration import Calibration, generic
from steelyard.plan.costs import Setup
from steelyard.plan.device import Device, find_device
from steelyard.plan.formats import weight_format
from steelyard.plan.memory import GIB, KvPools
from steelyard.plan.presets import preset_config
from steelyard.plan.roofline import Rates, Roofline
from steelyard.plan.service import Limits, Service
from steelyard.plan.shape import ModelShape


def make_roofline(model: str = "llama-3-8b", device: Device | str = "H200") -> Roofline:
    where = find_device(device) if isinstance(device, str) else device
    return Roofline(Setup(ModelShape.from_config(preset_config(model)), where, weight_format("bf16")))


def make_service(
    model: str = "llama-3-8b",
    device: Device | str = "H200",
    *,
    kv_gib: float = 100.0,
    seqs: int = 256,
    budget: int = 8192,
) -> Service:
    roofline = make_roofline(model, device)
    pools = KvPools.of(roofline.setup.shape, 16)
    blocks = pools.blocks_at(pools.fit(int(kv_gib * GIB)))
    return Service(roofline, generic(roofline), Limits(pools, blocks, seqs, budget))


def exact(roofline: Roofline) -> Calibration:
    """No inefficiency and no fixed cost."""
    return Calibration(Rates.datasheet(roofline.setup.device), 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, "exact")
