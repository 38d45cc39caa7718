"""Two arms on the same tokens and tasks: how far apart they are, in numbers with intervals. Pure; asks nobody.

Teacher-forced figures use the same reference tokens in both arms, by position bucket: errors of a cache grow with
context and hide in an average over short ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

BUCKETS = (0, 128, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Scored:
    """A text as one arm scores it: ids, each token's log probability given those before (the first has none), top-k."""

    tokens: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What an arm went on with."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Positions from `start` on: perplexities of both arms, and how far single log probabilities moved."""

    start: int
    n: int
    perplexity_a: float
    perplexity_b: float
    mean_abs_diff: float
    p99_abs_diff: float

    @property
    def ratio(self) -> float:
        return self.perplexity_b / self.perplexity_a


@dataclass(frozen=True, slots=True)
class Distance:
    """Arm B from arm A. Shares from 0 to 1; KL in nats over A's top tokens; None: nothing to compare."""

    buckets: tuple[Bucket, ...]
    top1_agreement: float | None
    kl: float | None
    first_divergence: float | None
    same_answers: float | None
    length_ratio: float | None
    right_a: float | None
    right_b: float | None
    only_a: int
    only_b: int
    mcnemar_p: float
    num_tasks: int


def distance(
    scored: Sequence[tuple[Scored, Scored]],
    answers: Sequence[tuple[Answer, Answer]],
    right: Sequence[tuple[bool, bool]],
) -> Distance:
    """Pairs (A, B) of the same text, of the same prompt's answers, and of whether a task was right."""
    only_a, only_b = sum(a and not b for a, b in right), sum(b and not a for a, b in right)
    tops = [pair for a, b in scored for pair in zip(a.top, b.top) if pair[0] and pair[1]]
    lengths = sum(a.num_tokens for a, _ in answers)
    return Distance(
        buckets=tuple(_buckets(scored)),
        top1_agreement=fmean(_top1(x) == _top1(y) for x, y in tops) if tops else None,
        kl=fmean(top_kl(x, y) for x, y in tops) if tops else None,
        first_divergence=_first_divergence(answers),
        same_answers=fmean(a.text == b.text for a, b in answers) if answers else None,
        length_ratio=sum(b.num_tokens for _, b in answers) / lengths if lengths else None,
        right_a=fmean(a for a, _ in right) if right else None,
        right_b=fmean(b for _, b in right) if right else None,
        only_a=only_a,
        only_b=only_b,
        mcnemar_p=mcnemar(only_a, only_b),
        num_tasks=len(right),
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p that the tasks only one arm got right fall so unevenly by chance (McNemar, 1947)."""
    n = only_a + only_b
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1)) / 2**n
    return min(1.0, 2.0 * tail)


def top_kl(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """KL(A || B) over A's top tokens and one bin for all others; a token B does not list has B's rest at most."""
    rest_b = max(1.0 - sum(math.exp(v) for v in b.values()), 1e-9)
    rest_a = max(1.0 - sum(math.exp(v) for v in a.values()), 0.0)
    least = min(b.values())
    total, missing_b = 0.0, rest_b
    for token, value in a.items():
        p, q = math.exp(value), math.exp(b[token]) if token in b else min(rest_b, math.exp(least))
        missing_b -= 0.0 if token in b else min(q, missing_b - 1e-9)
        total += p * math.log(p / max(q, 1e-12))
    return max(total + (rest_a * math.log(rest_a / max(missing_b, 1e-9)) if rest_a > 1e-9 else 0.0), 0.0)


def _top1(top: Mapping[str, float]) -> str:
    return max(top, key=lambda token: top[token])


def _buckets(scored: Sequence[tuple[Scored, Scored]]) -> list[Bucket]:
    pairs: dict[int, list[tuple[float, float]]] = {}
    for a, b in scored:
        assert a.tokens == b.tokens, "both arms must score the same tokens"
        for position, (x, y) in enumerate(zip(a.logprobs, b.logprobs)):
            if x is not None and y is not None:
                start = max(s for s in BUCKETS if s <= position)
                pairs.setdefault(start, []).append((x, y))
    found = []
    for start, values in sorted(pairs.items()):
        diffs = sorted(abs(x - y) for x, y in values)
        perplexities = [math.exp(-fmean(v[arm] for v in values)) for arm in (0, 1)]
        p99 = diffs[min(int(0.99 * len(diffs)), len(diffs) - 1)]
        found.append(Bucket(start, len(values), perplexities[0], perplexities[1], fmean(diffs), p99))
    return found


def _first_divergence(answers: Sequence[tuple[Answer, Answer]]) -> float | None:
    """Mean character at which answers part, of those that do; None: none does."""
    places = []
    for a, b in answers:
        if a.text != b.text:
            same = next((i for i, (x, y) in enumerate(zip(a.text, b.text)) if x != y), min(len(a.text), len(b.text)))
            places.append(same)
    return fmean(places) if places else None
