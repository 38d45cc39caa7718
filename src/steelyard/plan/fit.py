"""Fits the calibrated model to measured steps, and reports how it predicts steps that it has not seen.

Coefficients are found in log space by Gauss-Newton on log(predicted / measured), so that a short step counts as much as
a long one, under a prior: the model as it would be without records. Records decide what they can tell; what they cannot
(cached KV and products grow together while contexts are short) stays near what the machine is known to do.

    sum over groups of mean^2 / (GROUP_ERROR^2 + OWN_ERROR^2 / n)  +  sum over steps of (r - mean)^2 / OWN_ERROR^2
    +  sum over coefficients of log(c / prior)^2 / PRIOR_WIDTH^2

Steps with the same number of tokens run the same kernels in the same tiles and share an error, up to 30 % where tiles
do not fit: they are one group. A thousand equal steps so count as one observation of their kernels, while how time
grows with the context inside a group, free of that error, still tells what cached KV costs. It is generalised least
squares with a random effect a group; residuals far out count less (Huber).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steelyard.errors import StartError
from steelyard.plan.calibration import FEW_SAVE, Calibration, Work, default_calibration
from steelyard.plan.records import StepRecord
from steelyard.plan.roofline import Rates, Roofline, smooth_max

GROUP_ERROR = 0.05
OWN_ERROR = 0.01
PRIOR_WIDTH = (2.0, 1.0, 0.3, 0.3, 0.3, 0.3)
"""Of the logarithm of step_s, lone, arithmetic, weights, kv, attention. Fixed costs differ most between engines."""
LEAST_EFFICIENCY = 0.1
FAR_OUT = 3.0
"""Standard errors from which a residual counts less."""
_SMOOTH = 3.5
_ROUNDS = 60

Vector = list[float]


def fit(roofline: Roofline, records: Sequence[StepRecord]) -> Calibration:
    """The calibration that records and prior together make likely.

    Efficiencies stay between LEAST_EFFICIENCY and 1 of the datasheet's rates, so that no estimate is under the floor. A
    term that no record exercises keeps the prior's coefficient. Raises StartError with fewer than 8 records.
    """
    if len(records) < 8:
        raise StartError(f"{len(records)} step records are too few to fit; at least 8 are needed", param="records")
    prior = default_calibration(roofline)
    start = [math.log(max(c, 1e-6)) for c in prior.coefficients]
    problem = _Problem(_groups(roofline, records, prior.rates), start, _bounds(roofline, prior.rates))
    found = [math.exp(x) for x in problem.solve()]
    source = f"fitted to {len(records)} measured steps"
    return Calibration(prior.rates, found[0], found[1], found[2], found[3], found[4], found[5], source)


@dataclass(frozen=True, slots=True)
class Errors:
    """How a calibration predicts steps it has not seen. Relative errors of step times; totals of their sum.

    total        (predicted - measured) / measured of the whole time
    under_floor  records faster than the device's floor: each says that the accounts are wrong
    """

    num_steps: int
    mean_abs: float
    median_abs: float
    p95_abs: float
    total: float
    measured_s: float
    predicted_s: float
    under_floor: int

    @property
    def throughput(self) -> float:
        """Predicted over measured throughput, less 1: the same tokens in the predicted time."""
        return self.measured_s / self.predicted_s - 1.0


def evaluate(roofline: Roofline, calibration: Calibration, records: Sequence[StepRecord]) -> dict[str, Errors]:
    """Errors by workload name."""
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
    count = len(relative)
    return Errors(
        num_steps=count,
        mean_abs=sum(relative) / count,
        median_abs=relative[count // 2],
        p95_abs=relative[min(int(0.95 * count), count - 1)],
        total=(predicted - measured) / measured,
        measured_s=measured,
        predicted_s=predicted,
        under_floor=under,
    )


_Seen = tuple[Work, float]  # and the logarithm of the measured seconds


def _groups(roofline: Roofline, records: Sequence[StepRecord], rates: Rates) -> list[list[_Seen]]:
    """Records that share an error: the same tokens in a step, prompts or none, contexts within a factor of 1.4."""
    found: dict[tuple[int, bool, int], list[_Seen]] = {}
    for record in records:
        decodes = [c for c in record.chunks if c.num_new == 1]
        rows = sum(c.count for c in decodes)
        context = sum(c.context_len * c.count for c in decodes) / rows if rows else 1.0
        tokens = sum(c.num_new * c.count for c in record.chunks)
        key = (tokens, len(decodes) < len(record.chunks), round(2 * math.log2(context)))
        found.setdefault(key, []).append((Work.of(roofline, record.chunks, rates), math.log(record.device_s)))
    return list(found.values())


def _bounds(roofline: Roofline, used: Rates) -> tuple[Vector, Vector]:
    """Lowest and highest logarithm of each coefficient; efficiencies are of the datasheet's rates."""
    full = Rates.datasheet(roofline.setup.device)
    best = [
        math.log(used.matmul_flops / full.matmul_flops),
        math.log(used.weights_bandwidth / full.weights_bandwidth),
        math.log(used.kv_bandwidth / full.kv_bandwidth),
        math.log(used.attention_flops / full.attention_flops),
    ]
    least = -math.log(LEAST_EFFICIENCY)
    return [math.log(1e-6), math.log(0.01), *best], [0.0, 0.0, *(b + least for b in best)]


def _slopes(work: Work, at: Vector) -> tuple[float, Vector]:
    """Logarithm of the estimate, and its slope along the logarithm of each coefficient."""
    step, lone, arithmetic, weights, kv, attention = (math.exp(x) for x in at)
    saved = work.saved(FEW_SAVE)
    fixed = step * (1.0 - saved * (1.0 - lone))
    by_flops, by_bytes = 0.0, weights * work.passed_s
    for compute, moved in work.products:
        a, b = arithmetic * compute, weights * moved
        whole = smooth_max(a, b, _SMOOTH)
        share = (a / whole) ** _SMOOTH if whole else 0.0
        by_flops += whole * share
        by_bytes += whole * (1.0 - share)
    terms = [fixed, step * lone * saved, by_flops, by_bytes, kv * work.kv_s, attention * work.attention_s]
    total = sum(terms) - terms[1]
    return math.log(total), [t / total for t in terms]


@dataclass(frozen=True, slots=True)
class _Problem:
    groups: list[list[_Seen]]
    prior: Vector
    bounds: tuple[Vector, Vector]

    def solve(self) -> Vector:
        """Gauss-Newton steps of bounded length; a coefficient at a bound that pulls outward is held there."""
        low, high = self.bounds
        at = [min(max(p, a), b) for p, a, b in zip(self.prior, low, high)]
        for _ in range(_ROUNDS):
            matrix, slope = self._normal(at)
            held = [(x <= a and g > 0.0) or (x >= b and g < 0.0) for x, a, b, g in zip(at, low, high, slope)]
            free = [k for k, is_held in enumerate(held) if not is_held]
            moves = solve_linear([[matrix[i][j] for j in free] for i in free], [-slope[i] for i in free])
            new = list(at)
            for k, move in zip(free, moves):
                new[k] = min(max(at[k] + min(max(move, -0.5), 0.5), low[k]), high[k])
            moved = max(abs(a - b) for a, b in zip(new, at))
            at = new
            if moved < 1e-9:
                break
        return at

    def _normal(self, at: Vector) -> tuple[list[Vector], Vector]:
        """The normal matrix and the gradient at a point."""
        size = len(at)
        matrix = [[float(i == j) / PRIOR_WIDTH[i] ** 2 for j in range(size)] for i in range(size)]
        slope = [(x - p) / w**2 for x, p, w in zip(at, self.prior, PRIOR_WIDTH)]
        for group in self.groups:
            rows = [_slopes(work, at) for work, _ in group]
            errors = [value - measured for (value, _), (_, measured) in zip(rows, group)]
            middle = sorted(errors)[len(errors) // 2]
            trust = [_huber(e - middle, OWN_ERROR) for e in errors]
            whole = sum(trust)
            mean = sum(t * e for t, e in zip(trust, errors)) / whole
            mean_slopes = [sum(t * s[k] for t, (_, s) in zip(trust, rows)) / whole for k in range(size)]
            spread = GROUP_ERROR**2 + OWN_ERROR**2 / len(group)
            _add(matrix, slope, mean_slopes, mean, _huber(mean, GROUP_ERROR) / spread)
            for t, error, (_, slopes) in zip(trust, errors, rows):
                apart = [s - m for s, m in zip(slopes, mean_slopes)]
                _add(matrix, slope, apart, error - mean, t / OWN_ERROR**2)
        return matrix, slope


def _huber(error: float, width: float) -> float:
    return min(1.0, FAR_OUT * width / abs(error)) if error else 1.0


def _add(matrix: list[Vector], slope: Vector, along: Vector, error: float, weight: float) -> None:
    for i, a in enumerate(along):
        if a == 0.0:
            continue
        slope[i] += weight * a * error
        row, scaled = matrix[i], weight * a
        for j, b in enumerate(along):
            row[j] += scaled * b


def solve_linear(matrix: list[Vector], vector: Vector) -> Vector:
    """x of matrix x = vector for a positive definite matrix (Gaussian elimination)."""
    size = len(vector)
    a = [[*row, value] for row, value in zip(matrix, vector)]
    for k in range(size):
        for i in range(k + 1, size):
            factor = a[i][k] / a[k][k]
            for j in range(k, size + 1):
                a[i][j] -= factor * a[k][j]
    found = [0.0] * size
    for k in reversed(range(size)):
        found[k] = (a[k][size] - sum(a[k][j] * found[j] for j in range(k + 1, size))) / a[k][k]
    return found
