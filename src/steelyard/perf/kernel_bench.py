"""Run attentions on cases and say what each costs, in time and memory, against the machine and against naive.

Every case is checked before it is timed: an attention whose output strays from naive's (or, where naive does not fit,
from the first that ran) is a row that says so, without a time. Out of memory is a row too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from steelyard.perf.attention_backends import NO_GRADIENT, Forward, Unsupported, prepare
from steelyard.perf.attention_cases import AttentionCase
from steelyard.perf.ceilings import Ceiling, measure_ceiling
from steelyard.perf.environment import environment
from steelyard.perf.timing import clear, extra_bytes, median_ms, own_stream

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
ROTATE_BYTES = 200 * 2**20
"""Inputs are rotated over buffers of this much together, so that a GPU's cache does not serve what memory should."""


@dataclass(frozen=True, slots=True)
class Row:
    """One attention on one case in one direction. Figures are None where `note` says why there are none.

    share      of the ceiling that bounds this kind: matrix product for prefill, reading for decode
    speedup, memory_saving   naive's time (extra bytes) over this one's
    """

    case: AttentionCase
    backend: str
    direction: str
    ms: float | None = None
    tflops: float | None = None
    tb_per_s: float | None = None
    share: float | None = None
    extra_bytes: int | None = None
    error: float | None = None
    speedup: float | None = None
    memory_saving: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the bytes that arithmetic says the case moves."""
        values = asdict(self)
        case = values.pop("case")
        case["dtype"] = str(self.case.dtype).removeprefix("torch.")
        moved = {
            "least_bytes": self.case.least_bytes,
            "naive_bytes": self.case.naive_bytes,
            "tiled_bytes": self.case.tiled_bytes,
        }
        return {"kind": self.case.kind, **case, **values, **moved}


@dataclass(slots=True)
class Report:
    environment: dict[str, Any]
    device: str
    ceiling: Ceiling
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor


def run_bench(
    cases: Iterable[AttentionCase],
    backends: tuple[str, ...],
    directions: tuple[str, ...],
    device: torch.device,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Report:
    """Measure every (case, direction, backend). `on_row` is told of each row as it is made; cases are taken one by one,
    so that a caller may end them. There must be one at least; its dtype is the ceiling's."""
    rest = iter(cases)
    first = next(rest)
    with own_stream(device):
        report = Report(environment(), device.type, measure_ceiling(device, first.dtype))
        for case in chain((first,), rest):
            for direction in directions if case.kind == "prefill" else ("forward",):
                for row in _case_rows(case, direction, backends, report.ceiling, device):
                    report.rows.append(row)
                    on_row(row)
    return report


def _case_rows(
    case: AttentionCase, direction: str, backends: tuple[str, ...], ceiling: Ceiling, device: torch.device
) -> Iterator[Row]:
    inputs, oracle, base = _inputs(case, direction, device), None, None
    for name in backends:
        clear(device)
        row, found = _measure(case, name, direction, (inputs, oracle), device)
        if oracle is None:
            oracle = found
        if row.ms is not None:
            row = _against(row, ceiling, base)
        if name == "naive" and row.ms is not None:
            base = row
        yield row


def _measure(
    case: AttentionCase,
    name: str,
    direction: str,
    given: tuple[list[Inputs], list[Tensor] | None],
    device: torch.device,
) -> tuple[Row, list[Tensor] | None]:
    """(row, what it computed on the first inputs); the row has no time if it could not run or was wrong."""
    inputs, oracle = given
    row = Row(case, name, direction)
    if direction == "backward" and name in NO_GRADIENT:
        return _noted(row, "forward only"), None
    try:
        forward = prepare(name, case, device)
        found = _values(forward, inputs[0], direction)
        error = None if oracle is None else max(_relative(a, b) for a, b in zip(found, oracle))
        if error is not None and not error <= TOLERANCE[case.dtype]:
            return _noted(row, f"wrong: relative error {error:.2g}"), None
        calls = [_call(forward, x, direction) for x in inputs]
        memory = extra_bytes(calls[0], device)
        ms = median_ms(calls, device)
    except Unsupported as reason:
        return _noted(row, str(reason)), None
    except torch.cuda.OutOfMemoryError:
        return _noted(row, "out of memory"), None
    except RuntimeError as failure:
        return _noted(row, _in_words(failure)), None
    return Row(case, name, direction, ms=ms, extra_bytes=memory, error=error), found


def _against(row: Row, ceiling: Ceiling, base: Row | None) -> Row:
    """The row with rates, its share of the ceiling, and how it stands against naive."""
    assert row.ms is not None and row.extra_bytes is not None
    seconds, case = row.ms / 1e3, row.case
    flops = case.flops(row.direction == "backward") / seconds
    rate = case.least_bytes / seconds
    share = rate / ceiling.read_bandwidth if case.kind == "decode" else flops / ceiling.matmul_flops
    speedup = memory_saving = None
    if base is not None and base.ms is not None and base.extra_bytes is not None:
        speedup = base.ms / row.ms
        memory_saving = base.extra_bytes / row.extra_bytes if row.extra_bytes > 0 else None
    return Row(
        case, row.backend, row.direction, row.ms, flops / 1e12, rate / 1e12, share, row.extra_bytes, row.error,
        speedup, memory_saving,
    )  # fmt: skip


def _inputs(case: AttentionCase, direction: str, device: torch.device) -> list[Inputs]:
    """Random inputs, several sets where they are small; leaves that want a gradient for the backward."""
    copies = 1
    if device.type == "cuda":
        copies = min(8, max(1, math.ceil(ROTATE_BYTES / case.least_bytes)))
    generator = torch.Generator(device).manual_seed(0)
    q_shape = (case.batch, case.num_q, case.num_heads, case.head_dim)
    k_shape = (case.batch, case.num_k, case.num_kv_heads, case.head_dim)

    def draw(shape: tuple[int, ...], leaf: bool) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(case.dtype)
        return x.requires_grad_() if leaf and direction == "backward" else x

    return [
        Inputs(draw(q_shape, True), draw(k_shape, True), draw(k_shape, True), draw(q_shape, False))
        for _ in range(copies)
    ]


def _values(forward: Forward, x: Inputs, direction: str) -> list[Tensor]:
    out = forward(x.q, x.k, x.v)
    if direction == "forward":
        return [out.detach()]
    return [g.detach() for g in torch.autograd.grad(out, (x.q, x.k, x.v), x.grad)]


def _call(forward: Forward, x: Inputs, direction: str) -> Callable[[], object]:
    """What is timed: the forward, or the backward alone over a graph that is kept."""
    if direction == "forward":
        return lambda: forward(x.q, x.k, x.v)
    out = forward(x.q, x.k, x.v)
    return lambda: torch.autograd.grad(out, (x.q, x.k, x.v), x.grad, retain_graph=True)


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))


def _noted(row: Row, note: str) -> Row:
    return Row(row.case, row.backend, row.direction, note=note)


def _in_words(failure: RuntimeError) -> str:
    lines = str(failure).strip().splitlines() or ["failed"]
    if "memory" in lines[0] and ("allocate" in lines[0] or "out of" in lines[0]):
        return "out of memory"
    return "no such kernel here" if "No available kernel" in lines[0] else lines[0][:120]
