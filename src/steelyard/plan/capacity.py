"""From a load and targets to replicas, latencies, throughput, cost, what binds and what would help. No plots, no text.

Each constraint alone allows a largest rate per replica; the smallest is the capacity, and the next one says how much
removing the first would buy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from steelyard.errors import StartError
from steelyard.plan.costs import Setup
from steelyard.plan.device import Device
from steelyard.plan.roofline import Rates, Roofline
from steelyard.plan.service import Latency, Limits, Point, Service, largest, latency
from steelyard.plan.workload import Slo, Workload


@dataclass(frozen=True, slots=True)
class Constraint:
    """The rate per replica (requests/s) that one limit alone allows, and the rows decoding there."""

    name: str
    rate: float
    decoding: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """A load on its replicas. Rates are per second; those named `replica_` for one of them.

    constraints  tightest first: the first binds, the second would bind next; the last is device time itself
    limit        the steady state at the capacity of a replica
    knee_batch   rows from which a larger batch gains less throughput than it costs in time per token
    """

    load: Workload
    slo: Slo
    replicas: int
    feasible: bool
    replica_rate: float
    replica_capacity: float
    point: Point
    limit: Point
    latency: Latency
    constraints: tuple[Constraint, ...]
    knee_batch: int
    kv_share: float

    @property
    def utilisation(self) -> float:
        """Rate per replica over its capacity within the targets."""
        return self.replica_rate / self.replica_capacity if self.replica_capacity else math.inf

    @property
    def output_tokens_per_s(self) -> float:
        return self.replicas * self.served_rate * self.load.output_len

    @property
    def input_tokens_per_s(self) -> float:
        return self.replicas * self.served_rate * self.load.input_len

    @property
    def served_rate(self) -> float:
        """Requests per second that one replica completes: no more than it can."""
        return min(self.replica_rate, self.point.rate)

    @property
    def goodput(self) -> float:
        """Requests per second, all replicas, that meet every target; what exceeds capacity meets none."""
        return self.replicas * self.served_rate * self.latency.attainment if self.feasible else 0.0


def constraints(service: Service, load: Workload, slo: Slo) -> list[Constraint]:
    """What each limit alone allows, tightest first; those looser than the device's own time are left out."""
    full = service.full(load)
    sequences = service.max_sequences(load)

    def in_flight(point: Point) -> float:
        return point.decoding + point.rate * point.prefill_s

    def meets_ttft(point: Point) -> bool:
        at = latency(replace(load, rate=point.rate), point, Slo(slo.ttft_s, None, slo.attainment))
        return at.attainment >= slo.attainment

    tests: dict[str, Callable[[Point], bool]] = {
        "kv_memory": lambda point: in_flight(point) <= sequences,
        "max_num_seqs": lambda point: in_flight(point) <= service.limits.max_num_seqs,
    }
    tpot = slo.tpot_s
    if tpot is not None and load.decode_steps:
        tests["tpot"] = lambda point: point.tpot_s <= tpot
    if slo.ttft_s is not None:
        tests["ttft"] = meets_ttft
    most = service.at(load, full)
    found = [Constraint("device_time", most.rate, most.decoding)]
    for name, test in tests.items():
        u = largest(lambda u, test=test: test(service.at(load, u)), full)  # type: ignore[misc]
        point = service.at(load, u) if u else None
        if point is None or point.rate < most.rate * (1 - 1e-6):
            found.append(Constraint(name, point.rate if point else 0.0, point.decoding if point else 0.0))
    return sorted(found, key=lambda c: c.rate)


def solve(service: Service, load: Workload) -> Point | None:
    """The steady state whose rate is the load's, or None where even full steps do not reach it."""
    full = service.full(load)
    if service.at(load, full).rate < load.rate * (1 - 1e-6):
        return None
    return service.at(load, largest(lambda u: service.at(load, u).rate <= load.rate, full))


def capacity(service: Service, load: Workload, slo: Slo, replicas: int | None = None) -> Capacity:
    """Replicas that a load needs within its targets, or how it fares on a given number of them.

    Raises StartError where not one request at a time meets the targets, naming the target at fault.
    """
    found = constraints(service, load, slo)
    limit = found[0].rate
    if limit <= 0.0:
        held = service.max_sequences(load)
        if found[0].name == "kv_memory":
            raise StartError(
                f"the KV pool of {service.roofline.setup.device.name} holds {held} requests of {load.whole_len:,.0f} "
                "tokens: use more devices (--tensor-parallel-size), an 8-bit KV cache, or shorter requests",
                param="kv_memory",
            )
        at = latency(load, service.at(load, 1e-9), slo)
        raise StartError(
            f"no rate meets --{found[0].name.replace('_', '-')} on {service.roofline.setup.device.name}: alone, a "
            f"request has a time to first token of {at.ttft_s * 1e3:.1f} ms and {at.tpot_s * 1e3:.2f} ms a token, "
            f"and the KV pool holds {held} such requests",
            param=found[0].name,
        )
    count = replicas or max(math.ceil(load.rate / limit * (1 - 1e-9)), 1)
    each = replace(load, rate=load.rate / count)
    feasible = each.rate <= limit * (1 + 1e-9)
    point = solve(service, replace(each, rate=min(each.rate, limit)))
    most = solve(service, replace(each, rate=limit))
    assert point is not None and most is not None, "a rate within capacity has a steady state"
    seen = latency(replace(each, rate=point.rate) if not feasible else each, point, slo)
    return Capacity(
        load=load,
        slo=slo,
        replicas=count,
        feasible=feasible,
        replica_rate=each.rate,
        replica_capacity=limit,
        point=point,
        limit=most,
        latency=seen,
        constraints=tuple(found),
        knee_batch=knee(service, load),
        kv_share=seen.in_flight / max(service.max_sequences(load), 1),
    )


def knee(service: Service, load: Workload) -> int:
    """The batch at which one more percent of rows gives half a percent more throughput.

    With a step of a + b * B throughput is B / (a + b * B), whose elasticity a / (a + b * B) falls to 1/2 where the
    rows cost as much as the weights: below, batching is nearly free; above, time per token grows faster.
    """
    context = max(round(load.mean_context), 1)

    def elasticity(batch: int) -> float:
        low, high = (service.step_s(((1, context, float(n), 1),)) for n in (batch, batch + max(batch // 16, 1)))
        grown = 1.0 + max(batch // 16, 1) / batch
        return 1.0 - math.log(high / low) / math.log(grown)

    batch = 1
    while batch < 65_536 and elasticity(batch * 2) > 0.5:
        batch *= 2
    low, high = batch, batch * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if elasticity(middle) > 0.5 else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Price:
    """Money per million tokens at a load; device time is divided by who uses it."""

    per_million_input: float
    per_million_output: float


def price(found: Capacity, per_device_hour: float, tp: int) -> Price:
    """Cost at the capacity within the targets, where replicas are as full as the targets allow.

    Prompts pay for the share of device time they take, outputs for the rest.
    """
    per_s = per_device_hour * tp / 3600.0
    load = found.load
    share = found.limit.prefill_share if load.decode_steps else 1.0
    per_input = per_s * share / (found.replica_capacity * load.input_len) * 1e6
    per_output = per_s * (1.0 - share) / (found.replica_capacity * load.output_len) * 1e6
    return Price(per_input, per_output)


@dataclass(frozen=True, slots=True)
class Change:
    """What a change of one thing does to the capacity of a replica: a factor, 1 is nothing."""

    name: str
    factor: float


def sensitivity(service: Service, load: Workload, slo: Slo) -> list[Change]:
    """What a tenth more of each resource, or KV of half the size, would buy. Largest first."""
    base = constraints(service, load, slo)[0].rate
    setup = service.roofline.setup
    changed = {
        "bandwidth +10%": _on_device(service, _scaled(setup.device, bandwidth=1.1)),
        "arithmetic +10%": _on_device(service, _scaled(setup.device, flops=1.1)),
        "KV memory +10%": _with_kv(service, setup.kv_dtype_bytes, 1.1),
        "max_num_seqs +10%": _with_seqs(service, math.ceil(service.limits.max_num_seqs * 1.1)),
    }
    if setup.kv_dtype_bytes > 1:
        changed["KV of half the bytes"] = _with_kv(service, setup.kv_dtype_bytes // 2, 1.0)
    found = []
    for name, other in changed.items():
        rate = constraints(other, load, slo)[0].rate
        found.append(Change(name, rate / base if base else math.inf if rate else 1.0))
    return sorted(found, key=lambda c: -c.factor)


def _scaled(device: Device, *, bandwidth: float = 1.0, flops: float = 1.0) -> Device:
    ceilings = device.ceilings
    if ceilings is not None:
        ceilings = replace(
            ceilings,
            matmul_flops=ceilings.matmul_flops * flops,
            attention_flops=ceilings.attention_flops * flops,
            weights_bandwidth=ceilings.weights_bandwidth * bandwidth,
            kv_bandwidth=ceilings.kv_bandwidth * bandwidth,
        )
    fp8 = None if device.fp8_flops is None else device.fp8_flops * flops
    return replace(
        device,
        bandwidth=device.bandwidth * bandwidth,
        bf16_flops=device.bf16_flops * flops,
        fp8_flops=fp8,
        ceilings=ceilings,
    )


def _on_device(service: Service, device: Device) -> Service:
    """The same service where peaks and ceilings are others; the calibration keeps its coefficients."""
    setup = replace(service.roofline.setup, device=device)
    from_ceilings = service.calibration.rates == service.roofline.measured
    rates = Rates.measured(device) if from_ceilings else Rates.datasheet(device)
    return Service(Roofline(setup), replace(service.calibration, rates=rates), service.limits)


def _with_kv(service: Service, dtype_bytes: int, memory: float) -> Service:
    """The same service with cached elements of another size and a pool of `memory` times the bytes."""
    setup: Setup = replace(service.roofline.setup, kv_dtype_bytes=dtype_bytes)
    pools = service.limits.pools
    new = replace(
        pools, block_bytes=tuple(b * dtype_bytes // service.roofline.setup.kv_dtype_bytes for b in pools.block_bytes)
    )
    budget = sum((n + 1) * b for n, b in zip(service.limits.num_blocks, pools.block_bytes))
    limits = replace(service.limits, pools=new, num_blocks=new.blocks_at(new.fit(int(budget * memory))))
    return Service(Roofline(setup), service.calibration, limits)


def _with_seqs(service: Service, max_num_seqs: int) -> Service:
    limits: Limits = replace(service.limits, max_num_seqs=max_num_seqs)
    return Service(service.roofline, service.calibration, limits)
