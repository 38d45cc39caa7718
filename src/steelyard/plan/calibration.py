"""The calibrated model of a step's time: what the estimate is made of, and coefficients where nothing was fitted.

    t = fixed + products + cached KV + prefill attention

    fixed      step_s: launches, small kernels, sampling; a step of one row alone pays the share `lone` of it, since
               products with one row run as matrix-vector kernels that take norms and gates with them; so do those of
               a few rows of a small model, in tiles, and such a step is half way between (FEW_SAVE)
    products   smooth_max(arithmetic * FLOPs / peak, weights * bytes / bandwidth) of each matrix part, and
               weights * bytes / bandwidth of what kernels pass on to each other (CostModel.passed_bytes)
    cached KV  kv * the roofline's time of decode attention, keys read in whole tiles
    attention  attention * the roofline's time of prefill attention

It is DistServe's form (arXiv 2401.09670: a constant, and terms in tokens, cached tokens and tokens squared) in units of
the roofline: a coefficient is 1 / efficiency, the same for every batch, length and model of a kind, so that the model
extrapolates where a polynomial would not. The constant is split in what weights explain and what they do not, and the
term in tokens bends where arithmetic overtakes the reading of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from steelyard.plan.costs import Chunk, CostModel
from steelyard.plan.roofline import Rates, Roofline, smooth_max
from steelyard.plan.times import Estimate

TERMS = ("step", "weights", "kv", "attention")
KEY_TILE = 64
"""Keys that attention reads at once; a sequence's last tile is half empty on average."""
FEW_ROWS = 16
"""Steps of at most so many tokens go through tiles (CostModel.has_tiles): as the kernels have it."""
FEW_SAVE = 0.5
"""Of what one row alone saves. Measured on an H200, Qwen3-0.6B at 2, 4, 8 and 16 rows: 0.59, 0.52, 0.47, 0.42."""
_PRODUCTS = ("weights", "experts", "head")


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does, in seconds at given rates.

    rows       lone, few (2 to FEW_ROWS decodes whose products go through tiles) or many
    products   (arithmetic, bytes) of each part that multiplies with weights
    passed_s   bytes that kernels pass on to each other at the weights' bandwidth, and what goes over links
    """

    rows: Literal["lone", "few", "many"]
    products: tuple[tuple[float, float], ...]
    passed_s: float
    kv_s: float
    attention_s: float

    @classmethod
    def of(cls, roofline: Roofline, chunks: Sequence[Chunk], rates: Rates) -> Work:
        """The work of a step."""
        tiled = [_whole_tiles(c) if c.num_new == 1 else c for c in chunks]
        parts = {p.name: p for p in roofline.step(tiled, rates=rates).parts}
        num_tokens = sum(c.num_new * c.count for c in chunks)
        passed = roofline.costs.passed_bytes(num_tokens, sum(c.num_sampled * c.count for c in chunks))
        links_s = parts["links"].memory_s if "links" in parts else 0.0
        attention = (parts.get(name) for name in ("attention_decode", "attention_prefill"))
        kv_s, attention_s = (smooth_max(p.compute_s, p.memory_s) if p else 0.0 for p in attention)
        return cls(
            rows=_rows(roofline.costs, chunks, num_tokens),
            products=tuple((p.compute_s, p.memory_s) for name in _PRODUCTS if (p := parts.get(name))),
            passed_s=passed / rates.weights_bandwidth + links_s,
            kv_s=kv_s,
            attention_s=attention_s,
        )

    def saved(self, few: float) -> float:
        """How much of what one row alone saves of the fixed cost this step saves."""
        return {"lone": 1.0, "few": few, "many": 0.0}[self.rows]


def _rows(costs: CostModel, chunks: Sequence[Chunk], num_tokens: int) -> Literal["lone", "few", "many"]:
    if num_tokens == 1:
        return "lone"
    if num_tokens > FEW_ROWS or any(c.num_new > 1 for c in chunks):  # a step with a prompt is padded to more
        return "many"
    return "few" if costs.has_tiles else "many"


def _whole_tiles(chunk: Chunk) -> Chunk:
    return Chunk(1, chunk.context_len + (KEY_TILE - 1) // 2, chunk.count, chunk.num_sampled)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates to start from and the coefficients. `source` says where they come from, for the reader.

    few     of what one row alone saves, what a few save; 0 for a steady state (`steady`)
    """

    rates: Rates
    step_s: float
    lone: float
    arithmetic: float
    weights: float
    kv: float
    attention: float
    source: str
    few: float = FEW_SAVE

    @property
    def steady(self) -> Calibration:
        """The same for the mean step of a steady state, whose rows are a mean too: where it is few, steps of more are
        among them, and a search over it needs a rate that never falls with the rows."""
        return replace(self, few=0.0)

    @property
    def coefficients(self) -> tuple[float, float, float, float, float, float]:
        return (self.step_s, self.lone, self.arithmetic, self.weights, self.kv, self.attention)

    def named(self) -> dict[str, float]:
        """The coefficients under the names that data carries; `step_ms` in milliseconds."""
        values = (self.step_s * 1e3, *self.coefficients[1:])
        return dict(zip(("step_ms", "lone", "arithmetic", "weights", "kv", "attention"), values))

    def terms(self, roofline: Roofline, chunks: Sequence[Chunk]) -> dict[str, float]:
        """Seconds of each of TERMS in a step; they sum to the estimate."""
        work = Work.of(roofline, chunks, self.rates)
        products = sum(smooth_max(self.arithmetic * c, self.weights * m) for c, m in work.products)
        return {
            "step": self.step_s * (1.0 - work.saved(self.few) * (1.0 - self.lone)),
            "weights": products + self.weights * work.passed_s,
            "kv": self.kv * work.kv_s,
            "attention": self.attention * work.attention_s,
        }

    def estimate(self, roofline: Roofline, chunks: Sequence[Chunk]) -> Estimate:
        """The expected time of a step."""
        return Estimate(sum(self.terms(roofline, chunks).values()))


def generic(roofline: Roofline) -> Calibration:
    """Coefficients to use where nothing was measured: products at 0.75 of the roofline, KV at 0.80, attention at 0.55.

    Products: Vidur's operator tables (arXiv 2405.05465) have 0.73 to 0.78 on A100 and H100 alike. KV and attention:
    what FlashInfer and FlashAttention-3 reach on an H200. 0.3 ms a step for launches and sampling.
    """
    rates = Rates.datasheet(roofline.setup.device)
    source = "generic efficiencies, nothing measured"
    return Calibration(rates, 3e-4, 1.0, 1 / 0.75, 1 / 0.75, 1 / 0.80, 1 / 0.55, source)


def from_ceilings(roofline: Roofline) -> Calibration:
    """The device's own ceilings and its fixed cost of a step. Raises StartError on a device without any."""
    rates = Rates.measured(roofline.setup.device)
    ceilings = roofline.setup.device.ceilings
    assert ceilings is not None
    source = "ceilings measured on the device" + (", in doubt: see the notes" if roofline.setup.device.doubts else "")
    return Calibration(rates, ceilings.step_s, 1.0, 1.0, 1.0, 1.0, 1.0, source)


def default_calibration(roofline: Roofline) -> Calibration:
    """From ceilings where the device has them, else generic."""
    return from_ceilings(roofline) if roofline.setup.device.ceilings else generic(roofline)
