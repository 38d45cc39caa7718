"""The gate: is the arm as close to the base as the base is to itself? Distances in, verdict out.

Greedy decoding is not the same at every batch size, so the base is first compared with itself at another one. An arm
inside that noise passes. Outside it, the gate fails where the excess is more than a reader may ignore. Every figure is
shown, with its limit; a pass needs all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from steelyard.core.verdict import Held, Outcome, Verdict
from steelyard.quality.compare import Distance, mcnemar

LOWEST_BASE, HIGHEST_BASE = 0.30, 0.90
PERPLEXITY_LIMIT = 0.0071
"""In position buckets; what a published gate of an 8-bit KV cache allows."""
TOP1_LIMIT = 0.02
KL_LIMIT, KL_TIMES = 0.01, 10.0
LENGTH_LIMIT = 0.02
P_LIMIT = 0.05
FEWEST_SOLVED = next(n for n in count(1) if mcnemar(n, 0) < P_LIMIT)
"""With fewer, losing all of them could still be chance."""


def judge(arm: Distance, noise: Distance) -> Verdict:
    """`arm`: the optimised configuration from the base. `noise`: the base from itself at another batch size.

    What one figure shows stands without the others: it fails if any does, and passes if all do.
    """
    figures = (*_perplexity(arm, noise), _top1(arm, noise), _kl(arm, noise), _tasks(arm), _length(arm, noise))
    found = {figure.outcome for figure in figures}
    outcome: Outcome = "fail" if "fail" in found else "does not count" if "does not count" in found else "pass"
    return Verdict(outcome, figures)


def _held(
    name: str, value: float | None, bounds: tuple[float | None, float | None], noise: float | None, form: str
) -> Held:
    low, high = bounds
    if value is None:
        return Held(name, None, low, high, noise, form, "does not count", f"{name}: {_UNKNOWN[name]}")
    inside = (low is None or value >= low) and (high is None or value <= high)
    return Held(name, value, low, high, noise, form, "pass" if inside else "fail")


_SCORES = "a server gave no log probabilities of a prompt; judge one that has echo with logprobs"
_TOP1, _KL, _LENGTH, _PERPLEXITY = "top-1 agreement", "KL on the top tokens", "length of answers", "perplexity"
_UNKNOWN = {_TOP1: _SCORES, _KL: _SCORES, _PERPLEXITY: _SCORES, _LENGTH: "the base answered nothing"}


def _perplexity(arm: Distance, noise: Distance) -> Iterator[Held]:
    """By bucket, the arm's over the base's: outside the noise of that bucket and outside what may be ignored."""
    floor = {b.start: max(b.ratio, 1.0 / b.ratio) - 1.0 for b in noise.buckets}
    for bucket, after in zip(arm.buckets, (*arm.buckets[1:], None)):
        known = floor.get(bucket.start)
        until = "on" if after is None else f"to {after.start - 1}"
        most = max(known or 0.0, PERPLEXITY_LIMIT)
        name = f"{_PERPLEXITY}, positions {bucket.start} {until}"
        yield _held(name, bucket.ratio - 1.0, (None, most), known, "+z.2%")
    if not arm.buckets:
        yield _held(_PERPLEXITY, None, (None, PERPLEXITY_LIMIT), None, "+z.2%")


def _top1(arm: Distance, noise: Distance) -> Held:
    known = noise.top1_agreement
    least = (1.0 if known is None else known) - TOP1_LIMIT
    return _held(_TOP1, None if known is None else arm.top1_agreement, (least, None), known, ".2%")


def _kl(arm: Distance, noise: Distance) -> Held:
    most = max(KL_TIMES * (noise.kl or 0.0), KL_LIMIT)
    return _held(_KL, None if noise.kl is None else arm.kl, (None, most), noise.kl, ".2g")


def _tasks(arm: Distance) -> Held:
    """The chance of losing tasks as unevenly as this where the arms are alike; 1 if no more are lost than won."""
    if arm.right_a is None or arm.right_b is None:
        return Held("tasks", None, P_LIMIT, None, None, ".2g", "does not count", "tasks: none was asked; ask some")
    name = f"tasks right {arm.right_a:.0%} -> {arm.right_b:.0%}, {arm.only_a} lost, {arm.only_b} won: p"
    p = arm.mcnemar_p if arm.only_a > arm.only_b else 1.0
    why = _no_harm_could_show(arm.right_a, arm.num_tasks)
    if why:
        return Held(name, p, P_LIMIT, None, None, ".2g", "does not count", f"tasks: the base solves {why}")
    return _held(name, p, (P_LIMIT, None), None, ".2g")


def _no_harm_could_show(base: float, num_tasks: int) -> str:
    """What the base solves, why that cannot tell, and what can; empty where it tells."""
    shows = f"{base:.0%} of {num_tasks}, and harm shows only from {LOWEST_BASE:.0%} to {HIGHEST_BASE:.0%}"
    if base < LOWEST_BASE:
        return f"{shows}: compare the same flags on a model that solves more of them"
    if base > HIGHEST_BASE:
        return f"{shows}: compare the same flags on a smaller model of the family too"
    if round(base * num_tasks) < FEWEST_SOLVED:
        return f"{round(base * num_tasks)} of {num_tasks}, and fewer than {FEWEST_SOLVED} lost may be chance: ask more"
    return ""


def _length(arm: Distance, noise: Distance) -> Held:
    bounds = 1.0 - LENGTH_LIMIT, 1.0 + LENGTH_LIMIT
    return _held(_LENGTH, arm.length_ratio, bounds, noise.length_ratio, ".3f")
