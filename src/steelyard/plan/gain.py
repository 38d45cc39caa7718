"""What turning one knob of a running server is predicted to buy. Pure arithmetic over the calibrated step model.

    gain(knob, roofline, calibration, seen) -> Gain | None        knob: one of KNOBS; None: `seen` says too little

`seen` is the server's state as it was read, the answer a ratio with its formula in words. A mean step of B rows is

    T(B) = T_decode(B) + B / output * (T_mixed(B) - T_decode(B))

where T_mixed also computes one request's prompt: B / output requests finish, and so start, in a step. It does not
choose the knob, and it does not see queues: `capacity` plans a load, this weighs one change of what is running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from steelyard.plan.calibration import Calibration
from steelyard.plan.costs import Chunk
from steelyard.plan.formats import weight_format
from steelyard.plan.roofline import Roofline

THROUGHPUT = "output tokens per second"
GAP = "longest gap between tokens"


@dataclass(frozen=True, slots=True)
class Running:
    """What a server does now. Means over the time that was looked at; None: not read.

    decoding      sequences in a decode step, and `context_len` their tokens
    waiting       requests in its queue
    prompt_len    prompt tokens of a request that are computed (cached ones left out), and `output_len` its answer's
    kv_usage      share of the KV pool in use, 0 to 1
    step_s        the measured mean step
    """

    decoding: float
    context_len: float
    waiting: float = 0.0
    prompt_len: float = 0.0
    output_len: float = 1.0
    kv_usage: float | None = None
    step_s: float | None = None
    block_size: int = 64
    max_num_batched_tokens: int = 8192

    def __post_init__(self) -> None:
        assert self.decoding >= 1.0 and self.context_len >= 1.0, self
        assert self.output_len >= 1.0 and self.waiting >= 0.0 and self.prompt_len >= 0.0, self
        assert self.kv_usage is None or 0.0 < self.kv_usage <= 1.0, self


@dataclass(frozen=True, slots=True)
class Gain:
    """`ratio` of `of` after the change over before; `formula` says in words, with the numbers, how it was found."""

    knob: str
    ratio: float
    of: str
    formula: str

    @property
    def text(self) -> str:
        """One line: `1.34 x output tokens per second: ...`."""
        return f"{self.ratio:.2f} x {self.of}: {self.formula}"


def gain(knob: str, roofline: Roofline, calibration: Calibration, seen: Running) -> Gain | None:
    """The predicted effect of a knob of KNOBS, one step of it; None where what it needs was not read."""
    assert knob in KNOBS, f"knob {knob!r} is none of {', '.join(KNOBS)}"
    return KNOBS[knob](_Steps(roofline, calibration, seen), seen)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Estimated seconds of the server's steps."""

    roofline: Roofline
    calibration: Calibration
    seen: Running

    def decode_s(self, rows: float) -> float:
        return self.calibration.estimate(self.roofline, (self._decodes(rows),)).seconds

    def mixed_s(self, rows: float, prompt: float) -> float:
        """A step of decodes and `prompt` tokens of prompts, none of them longer than a request's."""
        each = max(min(round(self.seen.prompt_len), round(prompt)), 1)
        prompts = Chunk(each, each, max(round(prompt / each), 1))
        return self.calibration.estimate(self.roofline, (self._decodes(rows), prompts)).seconds

    def mean_s(self, rows: float, prompt_len: float | None = None) -> float:
        """T(B)."""
        prompt = self.seen.prompt_len if prompt_len is None else prompt_len
        alone = self.decode_s(rows)
        if prompt < 1.0:
            return alone
        return alone + rows / self.seen.output_len * (self.mixed_s(rows, prompt) - alone)

    def _decodes(self, rows: float) -> Chunk:
        return Chunk(1, round(self.seen.context_len), max(round(rows), 1))


def _more_rows(steps: _Steps, seen: Running) -> Gain | None:
    """--max-num-seqs: those that wait run too, as far as KV goes."""
    now = seen.decoding
    most = now / seen.kv_usage if seen.kv_usage else float("inf")
    return _rows(steps, steps, "max_num_seqs", now + min(seen.waiting, max(most - now, 0.0)), seen)


def _smaller_kv(steps: _Steps, seen: Running) -> Gain | None:
    """--kv-cache-dtype fp8: half the bytes are read, and where the pool is full twice the sequences are held."""
    setup = steps.roofline.setup
    if setup.kv_dtype_bytes == 1:
        return None
    other = replace(steps, roofline=Roofline(replace(setup, kv_dtype_bytes=1)))
    held = seen.decoding * setup.kv_dtype_bytes / (seen.kv_usage or 1.0)
    rows = min(seen.decoding + seen.waiting, max(held, seen.decoding))
    return _rows(steps, other, "kv_cache_dtype", rows, seen)


def _smaller_weights(steps: _Steps, seen: Running) -> Gain | None:
    """--dtype fp8: half the weights are read, in 8-bit products where the device has them."""
    setup = steps.roofline.setup
    if setup.weights.body not in ("BF16", "F16"):
        return None
    other = replace(steps, roofline=Roofline(replace(setup, weights=weight_format("fp8"))))
    return _rows(steps, other, "dtype", seen.decoding, seen)


def _reused_prompts(steps: _Steps, seen: Running) -> Gain | None:
    """Prefix caching, at its best: no prompt is computed but its last token."""
    if seen.prompt_len < 2.0:
        return None
    before, after = steps.mean_s(seen.decoding), steps.mean_s(seen.decoding, 1.0)
    said = f"at most, all of each prompt found cached: a mean step falls from {_ms(before)} to {_ms(after)}"
    return Gain("enable_prefix_caching", before / after, THROUGHPUT, said)


def _graphs(steps: _Steps, seen: Running) -> Gain | None:
    """No --enforce-eager: the host no longer paces the device, so that a step takes what the device needs."""
    if seen.step_s is None:
        return None
    device_s = steps.mean_s(seen.decoding)
    said = f"a step takes {_ms(seen.step_s)} and the device needs {_ms(device_s)}; graphs launch it at once"
    return Gain("enforce_eager", max(seen.step_s / device_s, 1.0), THROUGHPUT, said)


def _smaller_budget(steps: _Steps, seen: Running) -> Gain | None:
    """Half of --max-num-batched-tokens: a step that carries prompts delays every other token by less."""
    waits = seen.prompt_len * (1.0 + seen.waiting)
    room = max(seen.max_num_batched_tokens - seen.decoding, 1.0)
    half = max(seen.max_num_batched_tokens // 2 - seen.decoding, 1.0)
    if seen.prompt_len < 1.0:
        return None
    many, few = min(waits, room), min(waits, half)
    before, after = steps.mixed_s(seen.decoding, many), steps.mixed_s(seen.decoding, few)
    said = f"{few:,.0f} prompt tokens a step in place of {many:,.0f}: {_ms(after)} for {_ms(before)}"
    return Gain("max_num_batched_tokens", after / before, GAP, said)


def _smaller_blocks(steps: _Steps, seen: Running) -> Gain | None:
    """Half of --block-size: the last block of a sequence wastes half as much, so more of those that wait fit."""
    if seen.block_size < 2:
        return None
    before, after = (seen.context_len + (size - 1) / 2 for size in (seen.block_size, seen.block_size // 2))
    return _rows(steps, steps, "block_size", min(seen.decoding * before / after, seen.decoding + seen.waiting), seen)


def _rows(before: _Steps, after: _Steps, knob: str, rows: float, seen: Running) -> Gain:
    """Throughput is rows over the mean step."""
    now_s, then_s = before.mean_s(seen.decoding), after.mean_s(rows)
    said = f"{seen.decoding:.0f} rows in a mean step of {_ms(now_s)} become {rows:.0f} in {_ms(then_s)}"
    return Gain(knob, (rows / then_s) / (seen.decoding / now_s), THROUGHPUT, said)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


KNOBS: Mapping[str, Callable[[_Steps, Running], Gain | None]] = {
    "max_num_seqs": _more_rows,
    "kv_cache_dtype": _smaller_kv,
    "dtype": _smaller_weights,
    "enable_prefix_caching": _reused_prompts,
    "enforce_eager": _graphs,
    "max_num_batched_tokens": _smaller_budget,
    "block_size": _smaller_blocks,
}
"""Knobs by the name of the server's flag. Each is turned one step, in the direction that helps."""
