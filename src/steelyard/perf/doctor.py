"""The examination behind `steelyard doctor`: what is here, what runs, what it costs, and why no faster path was taken.

Nothing is believed that can be run: a backend is available if its attention computed the right numbers on this
machine, and a path was taken if the profiler saw its kernels.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from steelyard.errors import SteelyardError
from steelyard.perf.attention_backends import NAMES, Unsupported, prepare
from steelyard.perf.attention_cases import AttentionCase
from steelyard.perf.environment import environment, why_not_importable
from steelyard.perf.kernel_bench import Row, run_bench
from steelyard.perf.profile_kernels import KernelTime, kernels_of, path_of, standard_error

LIBRARIES = ("triton", "flashinfer", "flash_attn")
OURS = "steelyard"
SLOWER = 1.2
"""Times another attention's time beyond which ours is a finding; less is noise."""
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ran:
    """A call under the profiler: the attention it took and its longest kernels."""

    what: str
    path: str
    is_fast: bool
    kernels: tuple[KernelTime, ...]


@dataclass(frozen=True, slots=True)
class TorchChoice:
    """What scaled_dot_product_attention takes for a kind of input when left to choose, and why nothing faster."""

    dtype: str
    head_dim: int
    mask: str
    path: str
    why: str


@dataclass(slots=True)
class Examination:
    """`backends` and `libraries`: None if usable, else the reason. `findings`: sentences, the important ones first."""

    environment: dict[str, Any]
    device: str
    libraries: dict[str, str | None]
    backends: dict[str, str | None] = field(default_factory=dict)
    ran: list[Ran] = field(default_factory=list)
    choices: list[TorchChoice] = field(default_factory=list)
    compared: list[Row] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "kind": "steelyard-doctor",
            "version": 1,
            "environment": self.environment,
            "device": self.device,
            "libraries": self.libraries,
            "backends": self.backends,
            "ran": [asdict(ran) for ran in self.ran],
            "choices": [asdict(choice) for choice in self.choices],
            "compared": [row.to_dict() for row in self.compared],
            "findings": self.findings,
        }


def examine(device: torch.device, cases: tuple[AttentionCase, ...], model_calls: Mapping[str, Call]) -> Examination:
    """Look, run, compare. `model_calls`: named calls of a served model's steps, run under the profiler as they are."""
    found = Examination(environment(), device.type, {name: why_not_importable(name) for name in LIBRARIES})
    for name in NAMES:
        found.backends[name] = _why_not(name, cases[0], device)
    for case in cases:
        if found.backends[OURS] is None:
            inputs, forward = _inputs(case, device), prepare(OURS, case, device)
            found.ran.append(_run(f"attention, {case}", lambda f=forward, x=inputs: f(*x), device))  # type: ignore[misc]
    for what, call in model_calls.items():
        found.ran.append(_run(what, call, device))
    found.choices = _torch_choices(device)
    chosen = tuple(name for name in ("naive", "sdpa-flash", OURS) if found.backends[name] is None)
    found.compared = run_bench(cases, chosen, ("forward",), device).rows
    found.findings = _findings(found)
    return found


def _why_not(name: str, case: AttentionCase, device: torch.device) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of each backend it may not use; the reason is reported
            prepare(name, case, device)(*_inputs(case, device))
    except Unsupported as reason:
        return str(reason)
    except (RuntimeError, ImportError, SteelyardError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    return None


def _run(what: str, call: Call, device: torch.device) -> Ran:
    kernels = kernels_of(call, device)
    path = path_of(kernels)
    return Ran(what, path.name, path.is_fast, tuple(kernels[:8]))


def _inputs(case: AttentionCase, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    q_shape = (case.batch, case.num_q, case.num_heads, case.head_dim)
    k_shape = (case.batch, case.num_k, case.num_kv_heads, case.head_dim)
    q, k, v = (torch.randn(shape, device=device).to(case.dtype) for shape in (q_shape, k_shape, k_shape))
    return q, k, v


def _torch_choices(device: torch.device) -> list[TorchChoice]:
    """Left to itself, over the properties that decide in inference: dtype, head size, mask."""
    dtypes = (torch.bfloat16, torch.float32)
    choices = []
    for dtype in dtypes:
        for head_dim in (64, 128, 80, 100, 512):
            for mask in ("causal", "none", "bool mask"):
                if head_dim != 128 and mask in ("none", "bool mask"):
                    continue
                choices.append(_torch_choice(dtype, head_dim, mask, device))
    return choices


def _torch_choice(dtype: torch.dtype, head_dim: int, mask: str, device: torch.device) -> TorchChoice:
    q = torch.randn(1, 2, 128, head_dim, device=device).to(dtype)
    seen = torch.ones(128, 128, dtype=torch.bool, device=device).tril() if mask == "bool mask" else None

    def call() -> object:
        return scaled_dot_product_attention(q, q, q, attn_mask=seen, is_causal=mask == "causal")

    path = path_of(kernels_of(call, device))
    why = "" if path.name in ("torch flash", "cuDNN") else _why_no_flash(q, seen, mask == "causal", device)
    return TorchChoice(str(dtype).removeprefix("torch."), head_dim, mask, path.name, why)


def _why_no_flash(q: Tensor, mask: Tensor | None, is_causal: bool, device: torch.device) -> str:
    """torch's own reasons on CUDA, said as warnings, by C++ itself where no Python is in between; on a CPU none."""
    if device.type == "cpu":
        return "not said by torch"
    params = torch.backends.cuda.SDPAParams(q, q, q, mask, 0.0, is_causal, False)
    with standard_error(lambda line: False) as lines, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.backends.cuda.can_use_flash_attention(params, debug=True)
    return _reasons([*(str(w.message) for w in said), *lines])


def _reasons(warned: Sequence[str]) -> str:
    """Sentences of torch's warnings, without where in torch they stand."""
    found = [re.sub(r"^\[W.*?\] Warning: ", "", text).split(" (function ")[0] for text in warned]
    found = [text.split(" (Triggered")[0].strip().rstrip(".") for text in found]
    wanted = [t for t in found if t and "reasons" not in t.lower() and "not used because" not in t.lower()]
    return "; ".join(dict.fromkeys(wanted)) or "not said by torch"


def _findings(found: Examination) -> list[str]:
    """What a person should know, in sentences."""
    notes = _cuda_findings(found)
    if found.backends[OURS] is not None:
        notes.append(f"Steelyard's own attention did not run here: {found.backends[OURS]}.")
    for ran in found.ran:
        if not ran.is_fast:
            notes.append(f"No fast path in {ran.what}: {ran.path} (longest kernel: {_longest(ran)}).")
    for row in found.compared:
        if row.backend == OURS and row.ms is None:
            notes.append(f"Steelyard's attention failed on {row.case}: {row.note}.")
        elif row.backend == OURS and row.speedup is not None and row.speedup < 1:
            notes.append(f"Steelyard's attention is slower than naive on {row.case}: {row.speedup:.2f}x.")
    notes += _slower_than_others(found.compared)
    missing: dict[tuple[str, str, str], list[str]] = {}
    for c in found.choices:
        if c.why:
            missing.setdefault((c.path, c.dtype, c.why), []).append(f"head size {c.head_dim} {c.mask}")
    for (path, dtype, why), kinds in missing.items():
        notes.append(f"torch takes '{path}' for {dtype}, {', '.join(kinds)}: {why}.")
    return notes or ["Every path examined was a fast one."]


def _slower_than_others(rows: Sequence[Row]) -> list[str]:
    """Where ours takes over SLOWER times as long as the fastest other one; naive has its own sentence."""
    notes = []
    for ours in (row for row in rows if row.backend == OURS and row.ms is not None):
        alike = [r for r in rows if (r.case, r.direction) == (ours.case, ours.direction)]
        others = {r.backend: r.ms for r in alike if r.backend not in (OURS, "naive") and r.ms is not None}
        ratio, name = max(((ours.ms or 0.0) / ms, name) for name, ms in others.items()) if others else (0.0, "")
        if ratio > SLOWER:
            notes.append(
                f"Steelyard's attention takes {ratio:.2f} times as long as {name} on {ours.case}; "
                "that one is given keys and values in one piece, not in blocks."
            )
    return notes


def _longest(ran: Ran) -> str:
    return ran.kernels[0].name if ran.kernels else "none seen"


def _cuda_findings(found: Examination) -> list[str]:
    """Versions that do not go together, and a GPU that is there but not used."""
    cuda, gpu = found.environment["cuda"], found.environment["gpu"]
    notes = []
    if gpu is None and cuda["driver"] is not None:
        built = f"built for CUDA {cuda['runtime']}" if cuda["runtime"] else "a CPU-only build"
        notes.append(f"There is an NVIDIA driver ({cuda['driver']}) but torch sees no GPU; this torch is {built}.")
    if cuda["runtime"] and cuda["driver_supports"]:
        runtime, supported = _major(cuda["runtime"]), _major(cuda["driver_supports"])
        if runtime > supported:
            notes.append(
                f"torch's CUDA {cuda['runtime']} is newer than the driver supports ({cuda['driver_supports']}): "
                "update the driver, or install a torch built for an older CUDA."
            )
    if cuda["runtime"] and cuda["nvcc"] and _major(cuda["nvcc"]) != _major(cuda["runtime"]):
        notes.append(f"nvcc is {cuda['nvcc']}, torch's CUDA {cuda['runtime']}: extensions built here may not load.")
    if gpu is not None and float(gpu["capability"]) < 8.0:
        notes.append(
            f"Capability {gpu['capability']} ({gpu['architecture']}): no bfloat16 units, no fast path of ours."
        )
    return notes


def _major(version: str) -> int:
    return int(version.split(".")[0])
