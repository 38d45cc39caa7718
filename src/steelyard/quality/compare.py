"""Two arms on the same tokens and tasks: how far apart they are, in numbers with intervals. Pure; asks nobody.

Teacher-forced figures use the same reference tokens in both arms, by position bucket: errors of a cache grow with
context and hide in an average over short ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeGuard, TypeVar

_T = TypeVar("_T")
BUCKETS = (0, 128, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Scored:
    """A text as one arm scores it: ids, each token's log probability given those before (the first has none), top-k.

    A list that is shorter than the tokens, and a None in it, is what the arm did not give.
    """

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
    """Positions from `start` on: perplexities of both arms, and how far single log probabilities moved.

    of      positions of the texts
    n       of them, those that both arms gave a log probability of; without any, no figure: None
    ratio   B's perplexity over A's, held from e^-20 to e^20 (fillers such as -9999 are beyond any float)
    """

    start: int
    n: int
    of: int
    perplexity_a: float | None = None
    perplexity_b: float | None = None
    ratio: float | None = None
    mean_abs_diff: float | None = None
    p99_abs_diff: float | None = None


@dataclass(frozen=True, slots=True)
class Distance:
    """Arm B from arm A. Shares from 0 to 1; KL in nats over A's top tokens; None: nothing to compare.

    num_top, num_positions   positions that both listed top tokens at, of those that the texts have
    num_other_tokens         texts that B cuts into, or spells as, other tokens than A: nothing of them is compared
    """

    buckets: tuple[Bucket, ...]
    num_top: int
    num_positions: int
    num_other_tokens: int
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


@dataclass(frozen=True, slots=True)
class _Place:
    """A token of a text, not its first: what both arms gave there. None: one of them gave none."""

    position: int
    logprobs: tuple[float, float] | None = None
    tops: tuple[Mapping[str, float], Mapping[str, float]] | None = None


def distance(
    scored: Sequence[tuple[Scored, Scored]],
    answers: Sequence[tuple[Answer, Answer]],
    right: Sequence[tuple[bool, bool]],
) -> Distance:
    """Pairs (A, B) of the same text, of the same prompt's answers, and of whether a task was right."""
    only_a, only_b = sum(a and not b for a, b in right), sum(b and not a for a, b in right)
    places = [place for a, b in scored for place in _places(a, b)]
    tops = [place.tops for place in places if place.tops is not None]
    lengths = sum(a.num_tokens for a, _ in answers)
    return Distance(
        buckets=tuple(_buckets(places)),
        num_top=len(tops),
        num_positions=len(places),
        num_other_tokens=sum(not _same_tokens(a, b) for a, b in scored),
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


def _same_tokens(a: Scored, b: Scored) -> bool:
    """Whether they are, as far as both list them: a list may be cut short, or missing."""
    return all(x == y for x, y in zip(a.tokens, b.tokens))


def _places(a: Scored, b: Scored) -> Iterator[_Place]:
    """Every token of the text but its first, whatever was given of it. A text that neither lists is one."""
    listed = min(len(a.tokens), len(b.tokens)) if _same_tokens(a, b) else 0
    for i in range(1, max(len(a.tokens), len(b.tokens), 2)):
        x, y = _at(a.logprobs, i, listed), _at(b.logprobs, i, listed)
        top_a, top_b = _at(a.top, i, listed), _at(b.top, i, listed)
        yield _Place(
            i,
            (x, y) if _is_logprob(x) and _is_logprob(y) else None,
            (top_a, top_b) if _are_logprobs(top_a) and _are_logprobs(top_b) else None,
        )


def _at(values: Sequence[_T], i: int, listed: int) -> _T | None:
    return values[i] if i < min(len(values), listed) else None


def _is_logprob(value: float | None) -> TypeGuard[float]:
    """A finite number that is not above 0, but for rounding."""
    return isinstance(value, int | float) and math.isfinite(value) and value <= 0.01


def _are_logprobs(top: Mapping[str, float] | None) -> TypeGuard[Mapping[str, float]]:
    return bool(top) and isinstance(top, Mapping) and all(map(_is_logprob, top.values()))


def _buckets(places: Sequence[_Place]) -> Iterator[Bucket]:
    starts: dict[int, list[_Place]] = {}
    for place in places:
        starts.setdefault(max(s for s in BUCKETS if s <= place.position), []).append(place)
    for start, inside in sorted(starts.items()):
        values = [place.logprobs for place in inside if place.logprobs is not None]
        if not values:
            yield Bucket(start, 0, len(inside))
            continue
        diffs = sorted(abs(x - y) for x, y in values)
        mean_a, mean_b = (fmean(v[arm] for v in values) for arm in (0, 1))
        p99 = diffs[min(int(0.99 * len(diffs)), len(diffs) - 1)]
        yield Bucket(
            start,
            len(values),
            len(inside),
            perplexity_a=math.exp(min(-mean_a, 700.0)),
            perplexity_b=math.exp(min(-mean_b, 700.0)),
            ratio=math.exp(max(min(mean_a - mean_b, 20.0), -20.0)),
            mean_abs_diff=fmean(diffs),
            p99_abs_diff=p99,
        )


def _first_divergence(answers: Sequence[tuple[Answer, Answer]]) -> float | None:
    """Mean character at which answers part, of those that do; None: none does."""
    places = []
    for a, b in answers:
        if a.text != b.text:
            same = next((i for i, (x, y) in enumerate(zip(a.text, b.text)) if x != y), min(len(a.text), len(b.text)))
            places.append(same)
    return fmean(places) if places else None
