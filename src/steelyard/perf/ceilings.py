"""Measures what this machine's device can do: the ceilings that `steelyard plan --measure` plans with. Needs torch.

Every probe runs twice, some time apart: the better counts, and where they do not agree the device says so.

On a GPU each ceiling is a median of the operation that it bounds, repeated until it takes some milliseconds, on buffers
larger than any cache. What is measured are library kernels (reading also the server's own, where it is faster); the
server's may be faster or slower, and its step records say which.

A processor has no datasheet, and what was measured becomes the floor. So there the best run counts, products go the
server's own way (weights laid out for oneDNN), and bfloat16 and float32 are measured apart: the server computes in the
former where the processor multiplies it, and the two differ several times.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from steelyard.errors import StartError
from steelyard.kernels import cpu_linear, cpu_products
from steelyard.perf.timing import Call, best_ms, clear, median_ms, own_stream
from steelyard.plan.device import Ceilings, Device, best_of, find_device

Attend = Callable[..., Tensor]


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
ON_CPU = Sizes(2**26, 1024, 1, 512, 8, 4096, 8, 2)
IN_CACHE_ELEMENTS = 2**20
READ_COLUMNS = 4096
PRODUCT_BUDGET_S = 1.5
QUIET_LOAD = 0.25
"""Load average a core above which others take a measurable part of a machine."""


def measure(name: str | None = None, sizes: Sizes | None = None) -> Device:
    """The device of this machine with its ceilings; `name` picks the datasheet where it cannot be told.

    Without a GPU the processor is measured, in bfloat16 and in float32; where no datasheet is known the best that was
    seen stands in for it. `doubts` of the result: the machine was busy, or a probe gave two answers.

    Raises StartError for a name that is not in the table, or that is another device's.
    """
    on_gpu = torch.cuda.is_available()
    named = None if name is None else find_device(name)
    if named is not None and not on_gpu and not str(name).endswith(".toml"):
        raise StartError(
            f"--device {name} is not in this machine, which has no GPU: without --device its processor is measured",
            param="device",
        )
    busy = busy_with_others()
    where = torch.device("cuda" if on_gpu else "cpu")
    measured = (_measure_gpu if on_gpu else _measure_processor)(where, sizes or _sizes(where))
    if named is not None:
        assert measured.ceilings is not None
        measured = replace(named.with_ceilings(measured.ceilings), doubts=measured.doubts)
    return measured if busy is None else replace(measured, doubts=(busy, *measured.doubts))


def _measure_gpu(where: torch.device, sizes: Sizes) -> Device:
    with own_stream(where):
        ceilings, doubts = _ceilings(where, torch.bfloat16, sizes)
    properties = torch.cuda.get_device_properties(where)
    try:
        known = find_device(properties.name.split("(")[0].strip())
    except StartError:
        return replace(_from_ceilings(properties.name, ceilings, properties.total_memory), doubts=doubts)
    return replace(known, memory_bytes=properties.total_memory, ceilings=ceilings, doubts=doubts)


def busy_with_others() -> str | None:
    """A sentence where other work takes so much of this machine that what is measured now is too low; None if not."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= QUIET_LOAD * cores:
        return None
    return f"the machine was busy (load average {load:.1f} on {cores} cores) when measured: ceilings may be too low"


def _measure_processor(where: torch.device, sizes: Sizes) -> Device:
    """bf16 is the rate that 16-bit weights run at: their own products, or float32's where the processor has none.

    The device's bandwidth is that of its caches, which hold a small model or its KV whole; the ceilings are memory's.
    """
    rates = {dtype: _matmul(where, dtype, sizes) for dtype in (torch.bfloat16, torch.float32)}
    dtype = max(rates, key=lambda d: rates[d])
    ceilings, doubts = _ceilings(where, dtype, sizes)
    ceilings = replace(ceilings, matmul_flops=max(ceilings.matmul_flops, rates[dtype]))
    found = _from_ceilings("this processor", ceilings, _host_memory())
    in_cache = replace(sizes, copy_elements=min(sizes.copy_elements, IN_CACHE_ELEMENTS))
    bandwidth = max(found.bandwidth, _read(where, torch.float32, sizes), _read(where, torch.float32, in_cache))
    return replace(found, bandwidth=bandwidth, fp32_flops=rates[torch.float32], doubts=doubts)


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


def _ceilings(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> tuple[Ceilings, tuple[str, ...]]:
    """Every ceiling, and what is doubtful about them."""
    return best_of(_probed(where, dtype, sizes), _probed(where, dtype, sizes))


def _probed(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> Ceilings:
    """One probe after the other; each frees its buffers before the next."""
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
    if where.type == "cpu":
        return max(_cpu_product(dtype, sizes.side, rows, sizes.side) for rows in (sizes.side, sizes.side // 4))
    a = torch.randn(sizes.side, sizes.side, device=where, dtype=dtype)
    b = torch.randn(sizes.side, sizes.side, device=where, dtype=dtype)
    out = torch.empty_like(a)
    return 2.0 * sizes.side**3 / _seconds(where, lambda: torch.mm(a, b, out=out))


def _cpu_product(dtype: torch.dtype, num_in: int, rows: int, num_out: int) -> float:
    """FLOP/s of the server's product of `rows` with a weight [num_out, num_in]."""
    weight = cpu_linear.pack(torch.randn(num_out, num_in).to(dtype), ())
    x = torch.randn(rows, num_in).to(dtype)
    ms = best_ms(lambda: cpu_linear.product(x, weight, None), PRODUCT_BUDGET_S)
    return 2.0 * rows * num_in * num_out / (ms / 1e3)


def _thin_product(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Bytes/s of weights in a product of a few rows with a matrix of four sides' width.

    On a CPU the weight is as large as the copy's buffers, so that no cache holds it, and lies as the server's do.
    """
    if where.type == "cpu":
        num_out = max(sizes.copy_elements // sizes.side, 4 * sizes.side)
        flops = _cpu_product(dtype, sizes.side, sizes.rows, num_out)
        return flops * dtype.itemsize / (2.0 * sizes.rows)
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
    attend: Attend = scaled_dot_product_attention
    if where.type == "cpu" and cpu_products.are_faster(q, sizes.prompt_len):
        attend = _products
    return flops / _seconds(where, lambda: attend(q, k, v, is_causal=True))


def _products(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return cpu_products.attend(q, k, v, q.shape[-1] ** -0.5, None, is_causal)


def _decode_attention(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Bytes/s of keys and values when each row has one query per head; the heads of a group go as rows of a query."""
    group = sizes.heads // sizes.kv_heads
    q = torch.randn(sizes.kv_rows, sizes.kv_heads, group, sizes.head_dim, device=where, dtype=dtype)
    shape = (sizes.kv_rows, sizes.kv_heads, sizes.kv_len, sizes.head_dim)
    k, v = (torch.randn(shape, device=where, dtype=dtype) for _ in range(2))
    attend: Attend = scaled_dot_product_attention
    if where.type == "cpu" and cpu_products.are_faster(q, sizes.kv_len):
        attend = _products
    return 2.0 * k.numel() * k.element_size() / _seconds(where, lambda: attend(q, k, v))


def _copy(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Bytes/s read and written. On a GPU by a kernel: in a graph a plain copy is a node of its own, much slower."""
    source = torch.zeros(sizes.copy_elements, device=where, dtype=dtype)
    target = torch.empty_like(source)

    def once() -> None:
        if where.type == "cuda":
            torch.neg(source, out=target)
        else:
            target.copy_(source)

    return 2.0 * source.numel() * source.element_size() / _seconds(where, once)


def _read(where: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Bytes/s of reading. On a GPU by this server's matrix-vector product too: torch's reductions read slower."""
    source = torch.zeros(sizes.copy_elements, device=where, dtype=dtype)
    num_bytes = source.numel() * source.element_size()
    reduced = num_bytes / _seconds(where, lambda: torch.amax(source))
    if where.type == "cpu":
        return reduced
    gemv = importlib.import_module("steelyard.kernels.triton_linear").gemv  # no Triton on a machine without a GPU
    weight = source.view(-1, READ_COLUMNS)
    x, out = weight[:1].clone(), torch.empty(1, len(weight), device=where, dtype=dtype)
    return max(reduced, num_bytes / _seconds(where, lambda: gemv(x, weight, out)))


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
    """The best of many runs on a CPU, which others use too; the median on a GPU, which they do not."""
    return (best_ms(call) if where.type == "cpu" else median_ms([call], where)) / 1e3
