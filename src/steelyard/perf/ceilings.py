"""Measures what this machine's device can do: the ceilings that `steelyard plan --measure` plans with. Needs torch.

Each ceiling is the best of several runs of the operation that it bounds. A run is repeated until it takes some
milliseconds, on buffers larger than any cache. What is measured are library kernels; the server's own may be faster
or slower, and its step records say which.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from steelyard.errors import StartError
from steelyard.perf.timing import Call, clear, median_ms, own_stream
from steelyard.plan.device import Ceilings, Device, find_device


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best this machine does in this run: FLOP/s of a large matrix product, bytes/s of reading and of copying."""

    dtype: str
    matmul_flops: float
    read_bandwidth: float
    copy_bandwidth: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the probes are: elements of the copy, side of the products, and the attention's shape."""

    copy_elements: int
    side: int
    rows: int
    prompt_len: int
    kv_rows: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int = 128


ON_GPU = Sizes(2**30, 8192, 4, 8192, 128, 4096, 32, 8)
ON_CPU = Sizes(2**24, 1024, 1, 512, 8, 512, 8, 2)


def measure(name: str | None = None, sizes: Sizes | None = None) -> Device:
    """The device of this machine with its ceilings; `name` picks the datasheet where it cannot be told.

    Without a GPU the processor is measured; where no datasheet is known the ceilings stand in for it, so that the
    floor is what was measured. Raises StartError for a name that is not in the table, or that is another device's.
    """
    on_gpu = torch.cuda.is_available()
    named = None if name is None else find_device(name)
    if named is not None and not on_gpu and not str(name).endswith(".toml"):
        raise StartError(
            f"--device {name} is not in this machine, which has no GPU: without --device its processor is measured",
            param="device",
        )
    where = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with own_stream(where):
        ceilings = _ceilings(where, dtype, sizes or _sizes(where))
    if named is not None:
        return named.with_ceilings(ceilings)
    if on_gpu:
        properties = torch.cuda.get_device_properties(where)
        try:
            known = find_device(properties.name.split("(")[0].strip())
        except StartError:
            return _from_ceilings(properties.name, ceilings, properties.total_memory)
        return replace(known, memory_bytes=properties.total_memory).with_ceilings(ceilings)
    return _from_ceilings("this processor", ceilings, _host_memory())


def measure_ceiling(device: torch.device, dtype: torch.dtype, sizes: Sizes | None = None) -> Ceiling:
    """What kernels of a dtype are held against. On CUDA the caller is inside `own_stream`."""
    used = sizes or _sizes(device)
    name = str(dtype).removeprefix("torch.")
    found = _matmul(device, dtype, used), _read(device, dtype, used), _copy(device, dtype, used)
    clear(device)
    return Ceiling(name, *found)


def _sizes(where: torch.device) -> Sizes:
    return ON_GPU if where.type == "cuda" else ON_CPU


def _from_ceilings(name: str, ceilings: Ceilings, memory_bytes: int) -> Device:
    fastest = max(ceilings.matmul_flops, ceilings.attention_flops)
    widest = max(ceilings.copy_bandwidth, ceilings.weights_bandwidth, ceilings.kv_bandwidth)
    return Device(name, fastest, None, widest, memory_bytes, memory_bytes / 1e9, ceilings=ceilings)


def _host_memory() -> int:
    with open("/proc/meminfo") as lines:
        found = dict(line.split(":", 1) for line in lines)
    return int(found["MemTotal"].split()[0]) * 1024


def _ceilings(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> Ceilings:
    """Every ceiling, one probe after the other; each frees its buffers before the next."""
    found = Ceilings(
        matmul_flops=_matmul(where, dtype, sizes),
        attention_flops=_prefill_attention(where, dtype, sizes),
        weights_bandwidth=_thin_product(where, dtype, sizes),
        kv_bandwidth=_decode_attention(where, dtype, sizes),
        copy_bandwidth=_copy(where, dtype, sizes),
        step_s=_launch(where, dtype),
    )
    clear(where)
    return found


def _matmul(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    a = torch.randn(sizes.side, sizes.side, device=where, dtype=dtype)
    b = torch.randn(sizes.side, sizes.side, device=where, dtype=dtype)
    out = torch.empty_like(a)
    return 2.0 * sizes.side**3 / _seconds(where, lambda: torch.mm(a, b, out=out))


def _thin_product(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Bytes/s of weights in a product of a few rows with a matrix of four sides' width."""
    weight = torch.randn(sizes.side, 4 * sizes.side, device=where, dtype=dtype)
    x = torch.randn(sizes.rows, sizes.side, device=where, dtype=dtype)
    out = torch.empty(sizes.rows, 4 * sizes.side, device=where, dtype=dtype)
    return weight.numel() * weight.element_size() / _seconds(where, lambda: torch.mm(x, weight, out=out))


def _prefill_attention(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """FLOP/s of causal attention over one prompt, only the pairs under the mask counted."""
    shape = (1, sizes.heads, sizes.prompt_len, sizes.head_dim)
    q, k, v = (torch.randn(shape, device=where, dtype=dtype) for _ in range(3))
    pairs = sizes.prompt_len * (sizes.prompt_len + 1) / 2
    flops = 4.0 * sizes.heads * sizes.head_dim * pairs
    attend = torch.nn.functional.scaled_dot_product_attention
    return flops / _seconds(where, lambda: attend(q, k, v, is_causal=True))


def _decode_attention(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Bytes/s of keys and values when each row has one query per head; the heads of a group go as rows of a query."""
    group = sizes.heads // sizes.kv_heads
    q = torch.randn(sizes.kv_rows, sizes.kv_heads, group, sizes.head_dim, device=where, dtype=dtype)
    shape = (sizes.kv_rows, sizes.kv_heads, sizes.kv_len, sizes.head_dim)
    k, v = (torch.randn(shape, device=where, dtype=dtype) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    return 2.0 * k.numel() * k.element_size() / _seconds(where, lambda: attend(q, k, v))


def _copy(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    source = torch.zeros(sizes.copy_elements, device=where, dtype=dtype)
    target = torch.empty_like(source)
    return 2.0 * source.numel() * source.element_size() / _seconds(where, lambda: target.copy_(source))


def _read(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    source = torch.zeros(sizes.copy_elements, device=where, dtype=dtype)
    return source.numel() * source.element_size() / _seconds(where, lambda: torch.amax(source))


def _launch(where: torch.device, dtype: torch.dtype) -> float:
    """Seconds from asking for a step that does nothing to seeing its end: a launch, the device, and the wait."""
    x = torch.zeros(1, device=where, dtype=dtype)

    def once() -> None:
        x.add_(1)
        if where.type == "cuda":
            torch.cuda.synchronize()

    once()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter_ns()
        once()
        best = min(best, (time.perf_counter_ns() - start) / 1e9)
    return best


def _seconds(where: torch.device, call: Call) -> float:
    return median_ms([call], where) / 1e3
