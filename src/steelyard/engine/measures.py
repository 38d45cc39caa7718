"""What the ledgers need to know of model and device: bytes of a block, and the plan's arithmetic for steps."""

from __future__ import annotations

import torch

from steelyard.core.step import RunnerCaps
from steelyard.engine.ledgers import Measure
from steelyard.errors import StartError
from steelyard.plan.calibration import default_calibration
from steelyard.plan.costs import Setup
from steelyard.plan.device import Device, find_device
from steelyard.plan.formats import KV_DTYPE_BYTES, weight_format
from steelyard.plan.memory import kv_block_bytes
from steelyard.plan.roofline import Roofline
from steelyard.plan.shape import ModelShape


def block_bytes(shape: ModelShape, caps: RunnerCaps) -> tuple[int, ...]:
    """Bytes of a block of each KV group; empty where the cache's dtype is not one that the plan knows."""
    size = _held_bytes(caps)
    if size is None:
        return ()
    return tuple(kv_block_bytes(shape, caps.block_size, size, group=g) for g in range(len(caps.groups)))


def measure_on(device: Device, shape: ModelShape, caps: RunnerCaps) -> Measure | None:
    """Floor, reach and estimate of steps on `device`, or None where the cache's dtype is not known."""
    size = _held_bytes(caps)
    if size is None:
        return None
    roofline = Roofline(Setup(shape, device, weight_format(caps.kv_layout.split("/")[0]), size))
    return Measure(roofline, default_calibration(roofline))


def plan_device() -> Device | None:
    """The GPU of this process as the plan knows it; None on a CPU, and on a GPU without a datasheet here."""
    if not torch.cuda.is_available():
        return None
    try:
        return find_device(torch.cuda.get_device_name())
    except StartError:
        return None


def _held_bytes(caps: RunnerCaps) -> int | None:
    parts = caps.kv_layout.split("/")
    return KV_DTYPE_BYTES.get(parts[1]) if len(parts) > 1 else None
