"""The gate: is the arm as close to the base as the base is to itself? Distances in, verdict out.

Greedy decoding is not the same at every batch size, so the base is first compared with itself at another one. An arm
inside that noise passes. Outside it, the gate fails where the excess is more than a reader may ignore. Every figure is
shown, with its limit; a pass needs all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from steelyard.core.verdict import Held, Outcome, Verdict
from steelyard.quality.compare import Bucket, Distance, mcnemar
from steelyard.quality.tasks import ENOUGH_TASKS

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
        return Held(
            name,
            None,
            low,
            high,
            noise,
            form,
            "does not count",
            f"{name}: {_NO_ANSWERS if name == _LENGTH else _NO_SCORES}",
        )
    inside = (low is None or value >= low) and (high is None or value <= high)
    return Held(name, value, low, high, noise, form, "pass" if inside else "fail")


_NO_SCORES = "no text was scored; ask some tasks"
_NO_ANSWERS = "the base answered nothing"
_TOP1, _KL, _LENGTH, _PERPLEXITY = "top-1 agreement", "KL on the top tokens", "length of answers", "perplexity"
_GIVES = "that gives them for every token of a prompt (echo with logprobs)"


@dataclass(frozen=True, slots=True)
class Part:
    """How many of the positions of all texts a figure is of."""

    judged: int
    of: int
    num_other_tokens: int

    def gap(self, who: str, what_to_do: str) -> str:
        """Why it is not of all of them; empty where it is."""
        if self.num_other_tokens:
            texts = f"{self.num_other_tokens} text{'s' if self.num_other_tokens > 1 else ''}"
            return f"{who}: other tokens in {texts}; judge a server with the base's tokenizer"
        if self.judged == self.of:
            return ""
        return f"of {self.of} positions {who} gave log probabilities at {self.judged}; {what_to_do}"


def _of_all(figure: Held, arm: Part, noise: Part) -> Held:
    """A figure of a part of the positions fails where harm is seen in it, and passes nowhere."""
    gap = arm.gap("arm and base", f"judge a server {_GIVES}")
    gap = gap or noise.gap("the base, asked twice,", f"take a base {_GIVES}")
    if not gap or figure.outcome == "fail":
        return figure
    return replace(figure, outcome="does not count", note=f"{figure.name}: {gap}")


def _perplexity(arm: Distance, noise: Distance) -> Iterator[Held]:
    """By bucket, the arm's over the base's: outside the noise of that bucket and outside what may be ignored."""
    arms, floors = ({b.start: b for b in distance.buckets} for distance in (arm, noise))
    starts = sorted({*arms, *floors})
    for start, after in zip(starts, (*starts[1:], None)):
        floor = floors.get(start, Bucket(start, 0, arms[start].of if start in arms else 0))
        bucket = arms.get(start, Bucket(start, 0, floor.of))
        until = "on" if after is None else f"to {after - 1}"
        known = None if floor.ratio is None else max(floor.ratio, 1.0 / floor.ratio) - 1.0
        bounds, name = (None, max(known or 0.0, PERPLEXITY_LIMIT)), f"{_PERPLEXITY}, positions {start} {until}"
        value = None if bucket.ratio is None else bucket.ratio - 1.0
        parts = [Part(b.n, b.of, d.num_other_tokens) for b, d in ((bucket, arm), (floor, noise))]
        yield _of_all(_held(name, value, bounds, known, "+z.2%"), *parts)
    if not starts:
        yield _held(_PERPLEXITY, None, (None, PERPLEXITY_LIMIT), None, "+z.2%")


def _of_tops(figure: Held, arm: Distance, noise: Distance) -> Held:
    return _of_all(figure, *(Part(d.num_top, d.num_positions, d.num_other_tokens) for d in (arm, noise)))


def _top1(arm: Distance, noise: Distance) -> Held:
    known = noise.top1_agreement
    least = (1.0 if known is None else known) - TOP1_LIMIT
    figure = _held(_TOP1, None if known is None else arm.top1_agreement, (least, None), known, ".2%")
    return _of_tops(figure, arm, noise)


def _kl(arm: Distance, noise: Distance) -> Held:
    most = max(KL_TIMES * (noise.kl or 0.0), KL_LIMIT)
    figure = _held(_KL, None if noise.kl is None else arm.kl, (None, most), noise.kl, ".2g")
    return _of_tops(figure, arm, noise)


def _tasks(arm: Distance) -> Held:
    """The chance of losing tasks as unevenly as this where the arms are alike; 1 if no more are lost than won.

    A base that could show no harm voids a pass. Harm that is seen was shown.
    """
    if arm.right_a is None or arm.right_b is None:
        return Held("tasks", None, P_LIMIT, None, None, ".2g", "does not count", "tasks: none was asked; ask some")
    name = f"tasks right {arm.right_a:.0%} -> {arm.right_b:.0%}, {arm.only_a} lost, {arm.only_b} won: p"
    figure = _held(name, arm.mcnemar_p if arm.only_a > arm.only_b else 1.0, (P_LIMIT, None), None, ".2g")
    why = _no_harm_could_show(arm.right_a, arm.num_tasks)
    if not why or figure.outcome == "fail":
        return figure
    return replace(figure, outcome="does not count", note=f"tasks: the base solves {why}")


def _no_harm_could_show(base: float, num_tasks: int) -> str:
    """What the base solves, why that cannot tell, and what can; empty where it tells.

    The share of a few tasks tells little of the model's: with more of them the same base may well be inside.
    """
    shows = f"{base:.0%} of {num_tasks}, and harm shows only from {LOWEST_BASE:.0%} to {HIGHEST_BASE:.0%}"
    first = f"ask more tasks, {ENOUGH_TASKS} of them; if that is no help, " if num_tasks < ENOUGH_TASKS else ""
    if base < LOWEST_BASE:
        return f"{shows}: {first}compare the same flags on a model that solves more of them"
    if base > HIGHEST_BASE:
        return f"{shows}: {first}compare the same flags on a smaller model of the family too"
    if round(base * num_tasks) < FEWEST_SOLVED:
        return f"{round(base * num_tasks)} of {num_tasks}, and fewer than {FEWEST_SOLVED} lost may be chance: ask more"
    return ""


def _length(arm: Distance, noise: Distance) -> Held:
    bounds = 1.0 - LENGTH_LIMIT, 1.0 + LENGTH_LIMIT
    return _held(_LENGTH, arm.length_ratio, bounds, noise.length_ratio, ".3f")
