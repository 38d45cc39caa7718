"""What a device can do: peak arithmetic, memory bandwidth, memory size, links. No model, no measuring.

Peaks are dense (datasheets print the sparse numbers, twice as high, in larger type) and multiply 16-bit values
with 32-bit accumulation. Bandwidth is decimal. Memory is what the driver reports, in binary units: a card sold as
"141 GB" reports 139.8 GiB, so neither 141e9 nor 141 GiB is right.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from steelyard.errors import StartError, reason

GIB = 2**30
_NUMBERS = ("bf16_tflops", "bandwidth_gb_per_s", "memory_gib")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured on a machine, in FLOP/s and bytes/s: the best the kernels in use can do there.

    matmul_flops      a large 16-bit matrix product
    attention_flops   prefill attention, causal pairs counted once
    weights_bandwidth reading a matrix in a product with a few rows
    kv_bandwidth      reading cached keys and values in decode
    copy_bandwidth    a device-to-device copy, reads and writes counted
    step_s            a step's fixed cost: launches, sampling, the gap to the next
    """

    matmul_flops: float
    attention_flops: float
    weights_bandwidth: float
    kv_bandwidth: float
    copy_bandwidth: float
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. Rates per second; `fp8_flops` None: no such arithmetic; `label_gb` as sold.

    link_bandwidth  bytes/s to the other devices of the node, one direction; None: not known
    host_bandwidth  bytes/s of a copy to pinned host memory, one direction
    doubts          why the measured ceilings may be wrong, a sentence each
    """

    name: str
    bf16_flops: float
    fp8_flops: float | None
    bandwidth: float
    memory_bytes: int
    label_gb: float
    link_bandwidth: float | None = None
    host_bandwidth: float = 25e9
    fp32_flops: float | None = None
    ceilings: Ceilings | None = None
    doubts: tuple[str, ...] = ()

    def flops(self, kind: str) -> float:
        """Peak FLOP/s of the arithmetic that weights of a kind run in: "fp8" (if the device has it), "bf16", "fp32"."""
        if kind == "fp8" and self.fp8_flops:
            return self.fp8_flops
        if kind == "fp32" and self.fp32_flops:
            return self.fp32_flops
        return self.bf16_flops

    def ridge(self, kind: str = "bf16") -> float:
        """FLOPs per byte at which arithmetic and memory take the same time."""
        return self.flops(kind) / self.bandwidth

    def critical_batch(self, weight_bytes_per_element: float = 2.0, kind: str = "bf16") -> float:
        """Rows from which products with the weights are bound by arithmetic: ridge * bytes per weight / 2."""
        return self.ridge(kind) * weight_bytes_per_element / 2.0

    def with_ceilings(self, ceilings: Ceilings) -> Device:
        """The same device with measured ceilings beside its datasheet."""
        return replace(self, ceilings=ceilings)


def _mib(count: int) -> int:
    return count * 2**20


def _device(
    name: str, bf16: float, fp8: float | None, gb_per_s: float, size: tuple[float, int], link: float | None = None
) -> Device:
    """TFLOP/s, GB/s, (GB as sold, MiB as reported), GB/s to a neighbour."""
    label, mib = size
    fast = None if fp8 is None else fp8 * 1e12
    near = None if link is None else link * 1e9
    return Device(name, bf16 * 1e12, fast, gb_per_s * 1e9, _mib(mib), label, near)


_PCIE5 = {"H100", "H100-PCIe", "H200", "B200", "GB200", "MI300X", "MI325X"}
_PCIE5_COPY = 52e9
"""Bytes/s, measured on an H200; the others have the link before it, at half."""

DEVICES: Mapping[str, Device] = {
    d.name.lower(): replace(d, host_bandwidth=_PCIE5_COPY) if d.name in _PCIE5 else d
    for d in (
        _device("A100-40", 312, None, 1555, (40, 40_960), 300),
        _device("A100-80", 312, None, 2039, (80, 81_920), 300),
        _device("H100", 989.4, 1978.9, 3350, (80, 81_559), 450),
        _device("H100-PCIe", 756, 1513, 2000, (80, 81_559)),
        _device("H200", 989.4, 1978.9, 4800, (141, 143_155), 450),
        _device("B200", 2250, 4500, 8000, (180, 183_359), 900),
        _device("GB200", 2500, 5000, 8000, (186, 189_471), 900),
        _device("L4", 60.5, 121, 300, (24, 23_034)),
        _device("L40", 181, 362, 864, (48, 46_068)),
        _device("L40S", 362, 733, 864, (48, 46_068)),
        _device("RTX-4090", 165.2, 330.3, 1008, (24, 24_564)),
        _device("MI300X", 1307, 2615, 5300, (192, 196_592), 448),
        _device("MI325X", 1307, 2615, 6000, (256, 262_128), 448),
        _device("TPU-v5e", 197, None, 820, (16, 16_384), 45),
    )
}
"""Datasheet values by lower-case name."""

_SAME = {"h100-sxm": "h100", "h200-sxm": "h200", "a100": "a100-80", "4090": "rtx-4090", "rtx4090": "rtx-4090"}
_SAME |= {"v5e": "tpu-v5e", "h100-80": "h100", "a100-80gb": "a100-80", "a100-40gb": "a100-40"}


def find_device(name: str) -> Device:
    """A device by name, or from a TOML file. Raises StartError naming --device, or the file and its field."""
    if name.endswith(".toml"):
        return read_device(Path(name))
    key = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    found = DEVICES.get(_SAME.get(key, key))
    if found is None:
        known = ", ".join(d.name for d in DEVICES.values())
        raise StartError(f"--device must be one of {known}, or a .toml file, got {name!r}", param="device")
    return found


def read_device(path: Path) -> Device:
    """A device described by a TOML file. Raises StartError naming the file and the field at fault.

    name = "my card"            # keys with a unit in their name hold plain numbers
    bf16_tflops = 100.0
    bandwidth_gb_per_s = 1000.0
    memory_gib = 24.0           # fp8_tflops, fp32_tflops, link_gb_per_s, host_gb_per_s are optional
    [measured]                  # optional, all of them
    matmul_tflops = 80.0        # attention_tflops, weights_gb_per_s, kv_gb_per_s, copy_gb_per_s, step_us
    doubts = ["..."]            # optional: why these may be wrong
    """
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise StartError(f"--device {path}: cannot be read ({reason(error)})", param="device") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartError(f"--device {path}: is not TOML ({error})", param="device") from error
    optional = ("fp8_tflops", "fp32_tflops", "link_gb_per_s", "host_gb_per_s", "name", "measured")
    _known(path, table, _NUMBERS + optional)
    bf16, bandwidth, memory = (_number(path, table, key) for key in _NUMBERS)
    fp8, fp32, link, host = (_number(path, table, key) if key in table else None for key in optional[:4])
    device = Device(
        name=str(table.get("name", path.stem)),
        bf16_flops=bf16 * 1e12,
        fp8_flops=None if fp8 is None else fp8 * 1e12,
        bandwidth=bandwidth * 1e9,
        memory_bytes=int(memory * GIB),
        label_gb=memory,
        link_bandwidth=None if link is None else link * 1e9,
        fp32_flops=None if fp32 is None else fp32 * 1e12,
    )
    if host is not None:
        device = replace(device, host_bandwidth=host * 1e9)
    if "measured" in table:
        ceilings, doubts = _read_ceilings(path, table["measured"])
        device = replace(device.with_ceilings(ceilings), doubts=doubts)
    return device


_MEASURED = ("matmul_tflops", "attention_tflops", "weights_gb_per_s", "kv_gb_per_s", "copy_gb_per_s", "step_us")
_SCALES = (1e12, 1e12, 1e9, 1e9, 1e9, 1e-6)
AGREEMENT = 1.2
"""Rates of one probe, measured twice, that differ by more than this factor are in doubt."""


def best_of(first: Ceilings, again: Ceilings) -> tuple[Ceilings, tuple[str, ...]]:
    """The better of two measurements, probe by probe, and a sentence for each rate on which they do not agree.

    A step's fixed cost, some microseconds, is not compared.
    """
    pairs = list(zip(astuple(first), astuple(again), strict=True))
    best = replace(Ceilings(*(max(pair) for pair in pairs)), step_s=min(pairs[-1]))
    doubts = tuple(
        f"{key} came out as {a / scale:.3g} and as {b / scale:.3g} in one run"
        for key, scale, (a, b) in zip(_MEASURED[:-1], _SCALES, pairs)
        if max(a, b) > AGREEMENT * min(a, b)
    )
    return best, doubts


def _read_ceilings(path: Path, table: Any) -> tuple[Ceilings, tuple[str, ...]]:
    if not isinstance(table, dict):
        raise StartError(f"--device {path}: measured must be a table", param="measured")
    _known(path, table, (*_MEASURED, "doubts"))
    doubts = table.get("doubts", [])
    if not isinstance(doubts, list) or not all(isinstance(d, str) for d in doubts):
        raise StartError(f"--device {path}: doubts must be a list of sentences, got {doubts!r}", param="doubts")
    return Ceilings(*(_number(path, table, key) * scale for key, scale in zip(_MEASURED, _SCALES))), tuple(doubts)


def ceilings_toml(device: Device) -> str:
    """A device with measured ceilings as the TOML text that `read_device` reads."""
    assert device.ceilings is not None
    c = device.ceilings
    lines = [f'name = "{device.name}"', f"bf16_tflops = {device.bf16_flops / 1e12!r}"]
    for key, value, scale in (
        ("fp8_tflops", device.fp8_flops, 1e12),
        ("fp32_tflops", device.fp32_flops, 1e12),
        ("bandwidth_gb_per_s", device.bandwidth, 1e9),
        ("memory_gib", device.memory_bytes, GIB),
        ("link_gb_per_s", device.link_bandwidth, 1e9),
        ("host_gb_per_s", device.host_bandwidth, 1e9),
    ):
        if value is not None:
            lines.append(f"{key} = {value / scale!r}")
    lines += ["[measured]"] + [f"{k} = {v / s:.6g}" for k, v, s in zip(_MEASURED, astuple(c), _SCALES)]
    if device.doubts:
        lines.append(f"doubts = {json.dumps(device.doubts)}")
    return "\n".join(lines) + "\n"


def _known(path: Path, table: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in table:
        if key not in keys:
            raise StartError(f"--device {path}: {key} is not one of {', '.join(keys)}", param=key)


def _number(path: Path, table: Mapping[str, Any], key: str) -> float:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        what = "is missing" if value is None else f"got {value!r}"
        raise StartError(f"--device {path}: {key} must be a number above 0, {what}", param=key)
    return float(value)
