"""The calibrated model of a step's time: four coefficients, fitted to measured steps by least squares.

    t = step_s + weights * X_w + kv * X_kv + attention * X_a

X_w, X_kv and X_a are what the roofline gives the products, decode attention and prefill attention, each smooth where
arithmetic and memory cross; so a coefficient is 1 / efficiency, the same for every batch and length, and the model
extrapolates where a polynomial in tokens would not. Relative errors are minimised: a short step counts as much as a
long one. Coefficients are not negative; one that would be is dropped and the rest fitted again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import StartError
from steelyard.plan.costs import Chunk
from steelyard.plan.roofline import Rates, Roofline, smooth_max
from steelyard.plan.times import Estimate

TERMS = ("step", "weights", "kv", "attention")
_TERM_OF = {"weights": 1, "experts": 1, "head": 1, "links": 1, "attention_decode": 2, "attention_prefill": 3}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One measured step. `chunks` says what it did; `workload` names the run it came from."""

    chunks: tuple[Chunk, ...]
    device_s: float
    workload: str = ""

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> StepRecord:
        """Read a kept record.

        `device_ns`, and either `chunks` [[num_new, context_len, count, num_sampled], ...] (the last two optional) or
        sums: `prefill_tokens`, `prefill_rows`, `prefill_context_sum`, `decode_rows`, `context_sum` (of decode rows,
        the new token included). From sums, rows are taken to be alike. Raises StartError naming the field.
        """
        device_ns = _count(row, "device_ns", low=1)
        if "chunks" in row:
            chunks = tuple(_chunk(c) for c in row["chunks"])
        else:
            chunks = _alike(row)
        if not chunks:
            raise StartError(f"a step record without work: {json.dumps(row)[:200]}", param="decode_rows")
        return cls(chunks, device_ns / 1e9, str(row.get("workload", "")))


def read_records(path: Path) -> list[StepRecord]:
    """Every step of a JSON Lines file. Raises StartError naming file and line."""
    records = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--records {path}: cannot be read ({error})", param="records") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise StartError("is no JSON object", param="records")
            records.append(StepRecord.from_json(row))
        except ValueError as error:
            raise StartError(f"--records {path}: line {number} is no JSON ({error})", param="records") from error
        except StartError as error:
            raise StartError(f"--records {path}: line {number}: {error.message}", param=error.param) from error
    return records


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates to start from and the four coefficients. `source` says where they come from, for the reader."""

    rates: Rates
    step_s: float
    weights: float
    kv: float
    attention: float
    source: str

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        return (self.step_s, self.weights, self.kv, self.attention)

    def terms(self, roofline: Roofline, chunks: Sequence[Chunk]) -> dict[str, float]:
        """Seconds of each of TERMS in a step; they sum to the estimate."""
        x = features(roofline, chunks, self.rates)
        return {name: c * v for name, c, v in zip(TERMS, self.coefficients, x)}

    def estimate(self, roofline: Roofline, chunks: Sequence[Chunk]) -> Estimate:
        """The expected time of a step."""
        return Estimate(sum(self.terms(roofline, chunks).values()))


def generic(roofline: Roofline) -> Calibration:
    """Coefficients to use where nothing was measured: products at 0.75 of the roofline, KV at 0.80, attention at 0.55.

    Products: Vidur's operator tables (arXiv 2405.05465) have 0.73 to 0.78 on A100 and H100 alike. KV and attention:
    what FlashInfer and FlashAttention-3 reach on an H200. 0.3 ms a step for launches and sampling.
    """
    rates = Rates.datasheet(roofline.setup.device)
    return Calibration(rates, 3e-4, 1 / 0.75, 1 / 0.80, 1 / 0.55, "generic efficiencies, nothing measured")


def from_ceilings(roofline: Roofline) -> Calibration:
    """The device's own ceilings and its fixed cost of a step. Raises StartError on a device without any."""
    rates = Rates.measured(roofline.setup.device)
    ceilings = roofline.setup.device.ceilings
    assert ceilings is not None
    return Calibration(rates, ceilings.step_s, 1.0, 1.0, 1.0, "ceilings measured on the device")


def default_calibration(roofline: Roofline) -> Calibration:
    """From ceilings where the device has them, else generic."""
    return from_ceilings(roofline) if roofline.setup.device.ceilings else generic(roofline)


def features(roofline: Roofline, chunks: Sequence[Chunk], rates: Rates) -> tuple[float, float, float, float]:
    """(1, X_w, X_kv, X_a) of a step, the last three in seconds."""
    x = [1.0, 0.0, 0.0, 0.0]
    for part in roofline.step(chunks, rates=rates).parts:
        x[_TERM_OF[part.name]] += smooth_max(part.compute_s, part.memory_s)
    return (x[0], x[1], x[2], x[3])


def fit(roofline: Roofline, records: Sequence[StepRecord]) -> Calibration:
    """Fit the four coefficients to records, in units of the datasheet's rates.

    A term that no record exercises keeps its generic coefficient. Raises StartError with fewer than 8 records.
    """
    if len(records) < 8:
        raise StartError(f"{len(records)} step records are too few to fit; at least 8 are needed", param="records")
    rates = Rates.datasheet(roofline.setup.device)
    rows = [[v / r.device_s for v in features(roofline, r.chunks, rates)] for r in records]
    used = [k for k in range(4) if any(row[k] > 0.0 for row in rows)]
    found = _nonnegative_least_squares(rows, [1.0] * len(rows), used)
    fallback = generic(roofline).coefficients
    values = [found.get(k, 0.0) if k in used else fallback[k] for k in range(4)]
    source = f"fitted to {len(records)} measured steps"
    return Calibration(rates, values[0], values[1], values[2], values[3], source)


@dataclass(frozen=True, slots=True)
class Errors:
    """How a calibration predicts steps it has not seen. Relative errors of step times; totals of their sum.

    under_floor counts records faster than the device's floor: each says that the accounts are wrong.
    """

    num_steps: int
    mean_abs: float
    p95_abs: float
    total: float
    under_floor: int


def evaluate(roofline: Roofline, calibration: Calibration, records: Sequence[StepRecord]) -> dict[str, Errors]:
    """Held-out errors by workload name. `total` is (predicted - measured) / measured of the workload's whole time."""
    by_workload: dict[str, list[StepRecord]] = {}
    for record in records:
        by_workload.setdefault(record.workload, []).append(record)
    return {name: _errors(roofline, calibration, group) for name, group in by_workload.items()}


def _errors(roofline: Roofline, calibration: Calibration, records: Iterable[StepRecord]) -> Errors:
    relative, predicted, measured, under = [], 0.0, 0.0, 0
    for record in records:
        value = calibration.estimate(roofline, record.chunks).seconds
        relative.append(abs(value - record.device_s) / record.device_s)
        predicted, measured = predicted + value, measured + record.device_s
        under += roofline.floor(record.chunks, "fewest").is_broken_by(record.device_s)
    relative.sort()
    p95 = relative[min(int(0.95 * len(relative)), len(relative) - 1)]
    mean = sum(relative) / len(relative)
    return Errors(len(relative), mean, p95, (predicted - measured) / measured, under)


def _nonnegative_least_squares(rows: list[list[float]], targets: list[float], used: list[int]) -> dict[int, float]:
    """Minimise |rows x - targets|^2 with x >= 0: solve, drop the most negative coefficient, solve again."""
    free = list(used)
    while free:
        matrix = [[sum(r[i] * r[j] for r in rows) for j in free] for i in free]
        vector = [sum(r[i] * t for r, t in zip(rows, targets)) for i in free]
        solution = _solve(matrix, vector)
        worst = min(range(len(free)), key=lambda k: solution[k])
        if solution[worst] >= 0.0:
            return dict(zip(free, solution))
        free.pop(worst)
    return {}


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination with partial pivoting, after scaling unknowns to unit diagonal.

    A direction that the data does not determine gets 0 (features that never vary apart).
    """
    size = len(vector)
    scale = [matrix[i][i] ** 0.5 or 1.0 for i in range(size)]
    a = [[matrix[i][j] / (scale[i] * scale[j]) for j in range(size)] + [vector[i] / scale[i]] for i in range(size)]
    order: list[int] = []
    for column in range(size):
        rest = [r for r in range(size) if r not in order]
        pivot = max(rest, key=lambda r: abs(a[r][column]))
        if abs(a[pivot][column]) < 1e-11:
            order.append(-1)
            continue
        order.append(pivot)
        for row in range(size):
            if row != pivot and a[row][column]:
                factor = a[row][column] / a[pivot][column]
                a[row] = [x - factor * y for x, y in zip(a[row], a[pivot])]
    return [0.0 if order[c] < 0 else a[order[c]][size] / a[order[c]][c] / scale[c] for c in range(size)]


def _chunk(value: Any) -> Chunk:
    ok = isinstance(value, list) and 2 <= len(value) <= 4 and all(type(v) is int for v in value)
    if not ok or not 1 <= value[0] <= value[1] or (len(value) > 2 and value[2] < 1):
        raise StartError(f"chunks must be [num_new, context_len, count, num_sampled], got {value!r}", param="chunks")
    return Chunk(*value)


def _alike(row: dict[str, Any]) -> tuple[Chunk, ...]:
    """Chunks with the given sums. Contexts of decode rows keep their sum exactly: two groups one token apart."""
    chunks = []
    rows = _count(row, "decode_rows", default=0)
    if rows:
        low, extra = divmod(_count(row, "context_sum", low=rows), rows)
        if extra:
            chunks.append(Chunk(1, low + 1, extra))
        chunks.append(Chunk(1, low, rows - extra))
    tokens = _count(row, "prefill_tokens", default=0)
    if tokens:
        rows = min(_count(row, "prefill_rows", default=1, low=1), tokens)
        context = _count(row, "prefill_context_sum", default=tokens, low=tokens)
        low, extra = divmod(tokens, rows)
        each = max(context // rows, low + 1)
        chunks += [Chunk(n, each, k) for n, k in ((low + 1, extra), (low, rows - extra)) if k]
    return tuple(chunks)


def _count(row: dict[str, Any], name: str, *, default: int | None = None, low: int = 0) -> int:
    value = row.get(name, default)
    if type(value) is not int or value < low:
        raise StartError(f"{name} must be an integer of at least {low}, got {value!r}", param=name)
    return value
