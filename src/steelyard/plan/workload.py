"""What is asked of a server: arrivals, lengths and targets. From a rate and means, or from a trace. No model."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean, pvariance

from steelyard.errors import StartError, reason


@dataclass(frozen=True, slots=True)
class Workload:
    """A stationary load. Lengths in tokens, rate in requests per second.

    mean_context    tokens of context of a decoding request, averaged over its decode steps: long outputs weigh
                    more, so it is not mean(input) + mean(output) / 2 where lengths vary
    cached_tokens   prompt tokens found in the prefix cache, mean per request
    arrival_cv      coefficient of variation of the gaps between arrivals; 1: Poisson, 0: a metronome
    service_cv      the same of the prompts' computed lengths
    """

    rate: float
    input_len: float
    output_len: float
    mean_context: float
    cached_tokens: float = 0.0
    arrival_cv: float = 1.0
    service_cv: float = 0.0

    @classmethod
    def of(
        cls, rate: float, input_len: int, output_len: int, *, cached_tokens: int = 0, arrival_cv: float = 1.0
    ) -> Workload:
        """All requests alike. Raises StartError naming the flag of a value out of range."""
        if not 0.0 < rate < float("inf"):
            raise StartError(f"--rate must be a number above 0 requests a second, got {rate:g}", param="rate")
        for flag, value in (("input", input_len), ("output", output_len)):
            if value < 1:
                raise StartError(f"--{flag} must be at least 1 token, got {value}", param=flag)
        if not 0 <= cached_tokens < input_len:
            raise StartError(
                f"--cached-tokens must be between 0 and --input - 1 = {input_len - 1}, got {cached_tokens}",
                param="cached_tokens",
            )
        context = input_len + output_len / 2
        return cls(float(rate), float(input_len), float(output_len), context, float(cached_tokens), arrival_cv)

    @property
    def computed_len(self) -> float:
        """Prompt tokens that must be computed, mean per request."""
        return self.input_len - self.cached_tokens

    @property
    def decode_steps(self) -> float:
        """Steps a request decodes for: the first token comes with the prefill."""
        return self.output_len - 1.0

    @property
    def whole_len(self) -> float:
        return self.input_len + self.output_len


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets: seconds, and the share of requests that must meet them. None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    attainment: float = 0.9

    def __post_init__(self) -> None:
        for flag, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if value is not None and not 0.0 < value < float("inf"):
                raise StartError(f"--{flag} must be a time above 0, got {value:g} s", param=flag)
        if not 0.0 < self.attainment < 1.0:
            raise StartError(f"--attainment must be between 0 and 1, got {self.attainment:g}", param="attainment")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: seconds from its start, prompt and output tokens."""

    at_s: float
    input_len: int
    output_len: int


def from_trace(arrivals: Sequence[Arrival], *, cached_tokens: float = 0.0) -> Workload:
    """The load of a trace. Raises StartError where it has fewer than 2 requests or no duration."""
    if len(arrivals) < 2:
        raise StartError(f"--trace has {len(arrivals)} requests; at least 2 are needed", param="trace")
    times = sorted(a.at_s for a in arrivals)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean_gap = fmean(gaps)
    if mean_gap <= 0.0:
        raise StartError("--trace has all its requests at one instant; no rate follows from it", param="trace")
    inputs, outputs = [a.input_len for a in arrivals], [a.output_len for a in arrivals]
    # Over decode steps 1 .. n-1 of a request the context runs from input + 1 to input + n - 1.
    steps = sum(max(o - 1, 0) for o in outputs)
    held = sum((i + o / 2) * (o - 1) for i, o in zip(inputs, outputs))
    return Workload(
        rate=1.0 / mean_gap,
        input_len=fmean(inputs),
        output_len=fmean(outputs),
        mean_context=held / steps if steps else fmean(inputs) + 1,
        cached_tokens=cached_tokens,
        arrival_cv=pvariance(gaps) ** 0.5 / mean_gap,
        service_cv=pvariance(inputs) ** 0.5 / fmean(inputs),
    )


def read_trace(path: Path) -> list[Arrival]:
    """A trace file: JSON Lines or CSV, told apart by the first character. Raises StartError naming file and line.

    Names tried for each column, in order: `timestamp`, `arrival_s`, `TIMESTAMP`; `input_length`, `input`,
    `ContextTokens`; `output_length`, `output`, `GeneratedTokens`. A numeric `timestamp` is milliseconds (Mooncake),
    `arrival_s` seconds, a text timestamp a date and time (Azure).
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--trace {path}: cannot be read ({reason(error)})", param="trace") from error
    rows: Iterable[tuple[int, object]]
    if text.lstrip().startswith("{"):
        rows = [(n, _json(path, n, line)) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        rows = enumerate(csv.DictReader(text.splitlines()), 2)
    found = []
    for number, row in rows:
        try:
            found.append(_arrival(row))
        except (TypeError, ValueError, OverflowError) as error:
            raise StartError(f"--trace {path}: line {number}: {error}", param="trace") from error
    start = min((a.at_s for a in found), default=0.0)
    return [Arrival(a.at_s - start, a.input_len, a.output_len) for a in found]


def _json(path: Path, number: int, line: str) -> object:
    try:
        return json.loads(line)
    except ValueError as error:
        raise StartError(f"--trace {path}: line {number} is no JSON ({error})", param="trace") from error


def _arrival(row: object) -> Arrival:
    if not isinstance(row, dict):
        raise TypeError(f"expected an object, got {row!r}")
    name, value = _first(row, ("timestamp", "arrival_s", "TIMESTAMP"))
    if name == "TIMESTAMP":
        at_s = datetime.fromisoformat(str(value)[:26]).timestamp()
    else:
        at_s = float(value) / (1e3 if name == "timestamp" else 1.0)
    if not math.isfinite(at_s):
        raise ValueError(f"{name} must be a time, got {value!r}")
    input_len = int(_first(row, ("input_length", "input", "ContextTokens"))[1])
    output_len = int(_first(row, ("output_length", "output", "GeneratedTokens"))[1])
    if input_len < 1 or output_len < 1:
        raise ValueError(f"lengths must be at least 1 token, got {input_len} and {output_len}")
    return Arrival(at_s, input_len, output_len)


def _first(row: dict[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    for name in names:
        if row.get(name) not in (None, ""):
            return name, row[name]
    raise ValueError(f"none of the columns {', '.join(names)} is there")
