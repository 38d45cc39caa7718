"""How long a step must take: part by part, what bounds it, and how a measured time compares. No calibration.

    part's time = max(FLOPs / peak, bytes / bandwidth)        parts run one after the other, so times add

The whole-step form max(sum FLOPs / peak, sum bytes / bandwidth) is lower still: it grants that arithmetic of one
part runs under the memory traffic of another. It is reported as `overlapped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.errors import StartError
from steelyard.plan.costs import Chunk, Cost, CostModel, Routing, Setup
from steelyard.plan.device import Device
from steelyard.plan.times import Floor, Reach


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOP/s and bytes/s that parts run at; `fp8_gain` is how much faster 8-bit products are."""

    matmul_flops: float
    attention_flops: float
    weights_bandwidth: float
    kv_bandwidth: float
    fp8_gain: float = 1.0
    fp32_gain: float = 1.0
    link_bandwidth: float | None = None

    @classmethod
    def datasheet(cls, device: Device) -> Rates:
        peak, wide = device.bf16_flops, device.bandwidth
        return cls(peak, peak, wide, wide, *_gains(device), device.link_bandwidth)

    @classmethod
    def measured(cls, device: Device) -> Rates:
        """The device's ceilings. Raises StartError where it has none."""
        c = device.ceilings
        if c is None:
            raise StartError(f"{device.name} has no measured ceilings; run with --measure on it", param="device")
        rates = (c.matmul_flops, c.attention_flops, c.weights_bandwidth, c.kv_bandwidth)
        return cls(*rates, *_gains(device), device.link_bandwidth)

    def times(self, part: str, cost: Cost) -> tuple[float, float]:
        """(seconds of arithmetic, seconds of moving) of a part."""
        if part == "links":
            return 0.0, cost.link_bytes / self.link_bandwidth if self.link_bandwidth else 0.0
        in_attention = part.startswith("attention")
        flops = self.attention_flops if in_attention else self.matmul_flops
        bandwidth = self.kv_bandwidth if in_attention else self.weights_bandwidth
        gain = {"fp8": self.fp8_gain, "fp32": self.fp32_gain}.get(cost.kind, 1.0)
        return cost.flops / (flops * gain), cost.bytes / bandwidth


def _gains(device: Device) -> tuple[float, float]:
    return device.flops("fp8") / device.bf16_flops, device.flops("fp32") / device.bf16_flops


@dataclass(frozen=True, slots=True)
class PartTime:
    """A part of a step: its cost, and how long arithmetic and moving alone would take."""

    name: str
    cost: Cost
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        """What decides: "compute", "memory", or "links"."""
        if self.name == "links":
            return "links"
        return "compute" if self.compute_s > self.memory_s else "memory"


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step at given rates, by part."""

    parts: tuple[PartTime, ...]

    @property
    def seconds(self) -> float:
        return sum(p.seconds for p in self.parts)

    @property
    def overlapped_s(self) -> float:
        """The longer of all arithmetic and all moving, as if each part hid under the others."""
        return max(sum(p.compute_s for p in self.parts), sum(p.memory_s for p in self.parts))

    @property
    def bound(self) -> str:
        """The resource in whose parts most of the time goes: "compute", "memory" or "links"."""
        totals: dict[str, float] = {}
        for part in self.parts:
            totals[part.bound] = totals.get(part.bound, 0.0) + part.seconds
        return max(totals, key=lambda name: totals[name])

    @property
    def bound_part(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda p: p.seconds).name

    @property
    def flops(self) -> float:
        return sum(p.cost.flops for p in self.parts)

    @property
    def bytes(self) -> float:
        return sum(p.cost.bytes for p in self.parts)

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


class Roofline:
    """Step times of a setup at the datasheet's rates and, where the device has them, at measured ceilings."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.costs = CostModel(setup)
        self.rates = Rates.datasheet(setup.device)
        self.measured = Rates.measured(setup.device) if setup.device.ceilings else None

    def step(self, chunks: Sequence[Chunk], *, rates: Rates | None = None, routing: Routing = "uniform") -> StepTime:
        """The step by part, at the datasheet's rates unless others are given."""
        used = rates or self.rates
        parts = self.costs.parts(chunks, routing)
        return StepTime(tuple(PartTime(name, cost, *used.times(name, cost)) for name, cost in parts.items()))

    def floor(self, chunks: Sequence[Chunk], routing: Routing = "uniform") -> Floor:
        """The shortest time the device's datasheet allows. A gate on measured steps uses routing "fewest"."""
        return Floor(self.step(chunks, routing=routing).seconds)

    def reach(self, chunks: Sequence[Chunk]) -> Reach:
        """The shortest time the measured ceilings allow. Raises StartError on a device without any."""
        rates = self.measured or Rates.measured(self.setup.device)
        return Reach(self.step(chunks, rates=rates).seconds)

    def mbu(self, chunks: Sequence[Chunk], measured_s: float) -> float:
        """Memory bandwidth utilisation: the step's bytes over what the peak moves in the measured time."""
        return self.step(chunks).bytes / (self.setup.device.bandwidth * measured_s)

    def mfu(self, chunks: Sequence[Chunk], measured_s: float) -> float:
        """Model FLOPs utilisation: the step's FLOPs over what the peak does in the measured time."""
        kind = self.setup.weights.compute_kind
        return self.step(chunks).flops / (self.setup.device.flops(kind) * measured_s)


def smooth_max(a: float, b: float, power: float = 3.5) -> float:
    """The p-norm of two times: max(a, b) away from a == b, up to 2^(1/p) above it there.

    Measured products dip where arithmetic and memory cross (efficiency 0.75 falls to 0.5 to 0.66 around 128 to 256
    tokens), which the plain maximum misses.
    """
    high, low = max(a, b), min(a, b)
    if high == 0.0:
        return 0.0
    return high * (1.0 + (low / high) ** power) ** (1.0 / power)
