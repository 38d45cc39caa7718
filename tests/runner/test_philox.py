"""Philox4x32-10: the published known answers, and a twin in plain Python integers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from steelyard.runner.philox import philox, uniform_words

ONES, PI = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
# Random123 1.14, kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def twin(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & ONES, (a >> 32) ^ c[3] ^ k[1], a & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return tuple(c)


def ours(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    words = [np.array([w], np.uint64) for w in (*counter, *key)]
    result = philox((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    return tuple(int(w[0]) for w in result)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert ours(counter, key) == expected == twin(counter, key)


def test_many_equal_the_twin() -> None:
    rng = random.Random(3)
    for _ in range(200):
        words = [rng.getrandbits(32) for _ in range(6)]
        assert ours(tuple(words[:4]), tuple(words[4:])) == twin(tuple(words[:4]), tuple(words[4:]))


def test_a_uniform_is_the_first_word_of_seed_and_position() -> None:
    seeds, positions = np.array([0, 2**64 - 1, 77], np.uint64), np.array([0, 5, 131071], np.int64)
    expected = [
        twin((int(p), 0, 0, 0), (int(s) & ONES, int(s) >> 32))[0] for s, p in zip(seeds, positions, strict=True)
    ]
    assert uniform_words(seeds, positions).tolist() == expected
