"""The gate: is the arm as close to the base as the base is to itself? Distances in, verdict out.

Greedy decoding is not the same at every batch size, so the base is first compared with itself at another one. An arm
inside that noise passes. Outside it, the excess is stated and the gate fails where it is more than a reader may ignore.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from steelyard.quality.compare import Distance

LOWEST_BASE, HIGHEST_BASE = 0.30, 0.90
PERPLEXITY_LIMIT = log(1.0071)
"""In position buckets; what a published gate of an 8-bit KV cache allows."""
LENGTH_LIMIT = 0.02
P_LIMIT = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome`: "pass", "fail" or "does not count"; reasons have the numbers."""

    outcome: str
    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.outcome == "pass"


def judge(arm: Distance, noise: Distance) -> Verdict:
    """`arm`: the optimised configuration from the base. `noise`: the base from itself at another batch size."""
    base = arm.right_a
    if base is None or not LOWEST_BASE <= base <= HIGHEST_BASE:
        shown = "nothing" if base is None else f"{base:.0%}"
        text = f"the base solves {shown} of the tasks; harm shows only between {LOWEST_BASE:.0%} and {HIGHEST_BASE:.0%}"
        return Verdict("does not count", (text,))
    bad: list[str] = []
    good: list[str] = []
    for said, failed in (_perplexity(arm, noise), _tasks(arm), _top1(arm, noise), _kl(arm, noise), _length(arm)):
        if said:
            (bad if failed else good).append(said)
    return Verdict("fail" if bad else "pass", tuple(bad + good))


def _perplexity(arm: Distance, noise: Distance) -> tuple[str, bool]:
    """By bucket: outside the noise of that bucket and outside what may be ignored."""
    floor = {b.start: abs(log(b.ratio)) for b in noise.buckets}
    over = [b for b in arm.buckets if log(b.ratio) > max(floor.get(b.start, 0.0), PERPLEXITY_LIMIT)]
    if over:
        worst = max(over, key=lambda b: b.ratio)
        text = f"perplexity {worst.ratio - 1:+.2%} from position {worst.start} on"
        return f"{text}, noise {floor.get(worst.start, 0.0):.2%}, allowed {PERPLEXITY_LIMIT:.2%}", True
    return "perplexity within noise in every position bucket", False


def _tasks(arm: Distance) -> tuple[str, bool]:
    text = f"tasks right: base {arm.right_a:.0%}, arm {arm.right_b:.0%} ({arm.only_a} only base, {arm.only_b} only arm"
    text += f", McNemar p = {arm.mcnemar_p:.3f})"
    return text, arm.only_a > arm.only_b and arm.mcnemar_p < P_LIMIT


def _top1(arm: Distance, noise: Distance) -> tuple[str, bool]:
    if arm.top1_agreement is None or noise.top1_agreement is None:
        return "", False
    text = f"top-1 agreement {arm.top1_agreement:.2%}, of the base with itself {noise.top1_agreement:.2%}"
    return text, arm.top1_agreement < noise.top1_agreement - 0.02


def _kl(arm: Distance, noise: Distance) -> tuple[str, bool]:
    if arm.kl is None or noise.kl is None:
        return "", False
    text = f"KL on the top tokens {arm.kl:.2g}, of the base with itself {noise.kl:.2g}"
    return text, arm.kl > max(10.0 * noise.kl, 0.01)


def _length(arm: Distance) -> tuple[str, bool]:
    if arm.length_ratio is None:
        return "", False
    off = abs(arm.length_ratio - 1.0)
    return f"answers {arm.length_ratio:.3f} as long: over 2 % apart the work differs", off > LENGTH_LIMIT
