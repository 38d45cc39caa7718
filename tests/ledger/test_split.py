"""Parts are exact shares rounded up or down, and sum to the whole."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steelyard.ledger.split import split


def by_hand(amount: int, weights: list[int]) -> list[int]:
    """The rule in fractions: floors first, then one more to the largest remainders."""
    total = sum(weights)
    exact = [Fraction(amount * w, total) if total else Fraction(amount, len(weights)) for w in weights]
    parts = [int(x) for x in exact]
    order = sorted(range(len(weights)), key=lambda i: parts[i] - exact[i])
    for i in order[: amount - sum(parts)]:
        parts[i] += 1
    return parts


def test_ten_in_three() -> None:
    assert sorted(split(10, np.ones(3))) == [3, 3, 4]
    assert split(7, np.array([0.0, 1.0, 0.0])).tolist() == [0, 7, 0]
    assert split(5, np.zeros(2)).sum() == 5


@given(
    st.integers(0, 10**12),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=40),
)
def test_parts_sum_to_the_whole_and_are_within_one_of_their_share(amount: int, weights: list[int]) -> None:
    parts = split(amount, np.array(weights, np.float64))
    assert int(parts.sum()) == amount
    assert parts.min() >= 0
    total = sum(weights) or len(weights)
    for part, weight in zip(parts.tolist(), weights if sum(weights) else [1] * len(weights)):
        assert abs(part - Fraction(amount * weight, total)) <= 1 + Fraction(1, 1000)


@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_the_same_as_in_fractions_up_to_the_order_of_equals(amount: int, weights: list[int]) -> None:
    parts = split(amount, np.array(weights, np.float64)).tolist()
    if sum(weights) & (sum(weights) - 1) == 0:  # shares that floating point holds exactly
        exact = [Fraction(amount * weight, sum(weights)) for weight in weights]
        off = [sorted(p - x for p, x in zip(found, exact)) for found in (parts, by_hand(amount, weights))]
        assert off[0] == off[1]  # of equal remainders either may be rounded up
