"""Philox4x32-10, a counter-based random generator (Salmon et al., SC 2011): the same key and counter, the same draw.

One uniform per sampled token: key = the request's seed, counter = (position, draw). Whatever else is in the batch,
however the prompt was cut and whether the request was preempted, the draw is the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # values below 2^32; products of two fit

_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
ROUNDS = 10


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words from four counter words and two key words, elementwise."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(ROUNDS):
        bumped0 = (k0 + np.uint64(round_index * _WEYL[0])) & _LOW
        bumped1 = (k1 + np.uint64(round_index * _WEYL[1])) & _LOW
        first, second = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = (
            (second >> _SHIFT) ^ c1 ^ bumped0,
            second & _LOW,
            (first >> _SHIFT) ^ c3 ^ bumped1,
            first & _LOW,
        )
    return c0, c1, c2, c3


def uniform_words(seeds: NDArray[np.uint64], positions: NDArray[np.int64], draw: int = 0) -> NDArray[np.uint32]:
    """The first word for each (64-bit seed, position); divided by 2^32 it is uniform in [0, 1)."""
    zero = np.zeros(seeds.shape, np.uint64)
    counter = (positions.astype(np.uint64) & _LOW, zero + np.uint64(draw), zero, zero)
    word, _, _, _ = philox(counter, (seeds & _LOW, seeds >> _SHIFT))
    return word.astype(np.uint32)
