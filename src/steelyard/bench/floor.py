"""The shortest time a token can take on a device, from plan: what no measured TPOT may be below."""

from __future__ import annotations

from steelyard.plan.costs import Setup, decode
from steelyard.plan.device import find_device
from steelyard.plan.formats import weight_format
from steelyard.plan.models import find_model
from steelyard.plan.roofline import Roofline


def roofline_of(model: str, device: str, dtype: str | None = None, tp: int = 1) -> Roofline:
    """Raises StartError or CheckpointError naming the option at fault."""
    found = find_model(model)
    weights = weight_format(dtype) if dtype else found.stored
    return Roofline(Setup(found.shape, find_device(device), weights, tp=tp))


def floor_tpot_ms(roofline: Roofline, context_len: int, batch: int = 1) -> float:
    """Milliseconds of a decode step at datasheet peaks. A batch of one is the weakest claim: true of every batch."""
    return roofline.floor(decode(max(batch, 1), max(context_len, 1)), routing="fewest").seconds * 1e3
