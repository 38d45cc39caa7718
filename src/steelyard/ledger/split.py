"""Dividing an integer so that the parts sum to it exactly: the largest-remainder rule (Hamilton's apportionment).

10 ns by weights 1 1 1  ->  3.33 3.33 3.33  ->  4 3 3        no nanosecond is lost or made
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_sum = np.add.reduce  # at every step: without ndarray.sum's wrapper


def split(amount: int, weights: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """`amount` (0 <= amount < 2^52) in proportion to `weights` (none negative): int64 parts that sum to it.

    Each part is its exact share rounded down or up; the largest remainders are rounded up. Equal weights if all are 0.
    """
    assert 0 <= amount < 2**52, f"{amount} cannot be divided exactly"
    num_parts = len(weights)
    assert num_parts > 0, "nothing to divide among"
    total = float(_sum(weights))
    exact = weights * (amount / total) if total > 0.0 else np.full(num_parts, amount / num_parts)
    parts = exact.astype(np.int64)
    num_up = amount - int(_sum(parts))
    assert abs(num_up) <= num_parts, f"{num_up} of {amount} ns are left over"
    if num_up > 0:
        exact -= parts
        parts[exact.argpartition(num_parts - num_up)[num_parts - num_up :]] += 1
    elif num_up < 0:  # shares a hair under a whole number were taken for it
        parts[np.argpartition(-parts, -num_up - 1)[:-num_up]] -= 1
    return parts
