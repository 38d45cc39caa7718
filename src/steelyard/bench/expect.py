"""What plan expects of an ablation's two arms, before they are measured: a ratio of one figure, and how it was found.

Every prediction is the calibrated step model over the arms' work: B rows of `context` tokens, prompts of `input_len`,
answers of `output_len`. What plan has no term for is None, and said to be so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from steelyard.plan.calibration import Calibration
from steelyard.plan.costs import Chunk, decode
from steelyard.plan.formats import weight_format
from steelyard.plan.roofline import Roofline

SCORE_PASSES = 6
"""Times a materialised score crosses memory: written, scaled and masked, read and written by softmax, read again."""
SCORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Load:
    """Means of the requests, and how many run at once."""

    input_len: float
    output_len: float
    rows: float

    @property
    def context(self) -> int:
        """Tokens of a row half-way through its answer."""
        return max(round(self.input_len + self.output_len / 2), 1)


@dataclass(frozen=True, slots=True)
class Expected:
    """B over A of `of`; `formula` in words with its numbers."""

    of: str
    ratio: float
    formula: str


Model = tuple[Roofline, Calibration]
TPOT, RATE = "TPOT p50, ms", "output tokens/s"


def expected(knob: str, model: Model, load: Load, shared: float = 0.0) -> Expected | None:
    """What turning `knob` from A to B does. `shared`: share of prompt tokens that a prefix cache may find."""
    return _EXPECT[knob](model, load, shared) if knob in _EXPECT else None


def _step_s(model: Model, *chunks: Chunk) -> float:
    return model[1].estimate(model[0], chunks).seconds


def _decode_s(model: Model, load: Load) -> float:
    return _step_s(model, *decode(max(round(load.rows), 1), load.context))


def _kv_cache(model: Model, load: Load, shared: float) -> Expected:
    """Without: every step is a prefill of all rows' sequences."""
    kept = _decode_s(model, load)
    anew = _step_s(model, Chunk(load.context, load.context, max(round(load.rows), 1)))
    said = f"a step of {load.rows:.0f} x {load.context} tokens anew {_ms(anew)}, of one token a row {_ms(kept)}"
    return Expected(TPOT, kept / anew, said)


def _attention(model: Model, load: Load, shared: float) -> Expected:
    """Materialised scores of a decode step, and keys and values copied together first."""
    roofline = model[0]
    costs, rows = roofline.costs, max(round(load.rows), 1)
    heads = sum(layer.attention.num_heads for layer in roofline.setup.shape.layers)
    scores = rows * load.context * heads * SCORE_BYTES * SCORE_PASSES
    copied = 2 * rows * costs.kv_bytes(load.context)
    base = _decode_s(model, load)
    more = (scores + copied) / roofline.setup.device.bandwidth
    said = f"{(scores + copied) / 1e6:,.1f} MB more a step: {_ms(base)} become {_ms(base + more)} where they stand"
    return Expected(TPOT, base / (base + more), said)


def _dtype(model: Model, load: Load, shared: float) -> Expected:
    """Half the bytes of weights and KV."""
    wide = replace(model[0].setup, weights=weight_format("float32"), kv_dtype_bytes=4)
    narrow = replace(model[0].setup, weights=weight_format("bfloat16"), kv_dtype_bytes=2)
    before, after = (_decode_s((Roofline(s), model[1]), load) for s in (wide, narrow))
    return Expected(TPOT, after / before, f"a decode step {_ms(before)} in float32, {_ms(after)} in bfloat16")


def _prefix(model: Model, load: Load, shared: float) -> Expected:
    """Prompt tokens that are found need no computing."""
    whole = round(load.input_len)
    left = max(round(load.input_len * (1.0 - shared)), 1)
    before, after = (_step_s(model, Chunk(n, whole, 1)) for n in (whole, left))
    said = f"{shared:.0%} of a prompt found: {_ms(before)} of prefill become {_ms(after)}"
    return Expected("TTFT p50, ms", after / before, said)


_EXPECT: Mapping[str, Callable[[Model, Load, float], Expected]] = {
    "kv-cache": _kv_cache,
    "attention": _attention,
    "dtype": _dtype,
    "prefix-caching": _prefix,
}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
