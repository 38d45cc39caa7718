"""Whose cached blocks are given up: least recently used within a tenant, and nobody below its share for another."""

from __future__ import annotations

import random

from steelyard.cache.eviction import TENANT_BYTES, CachedBlocks

A, B, C = (bytes([n]) * TENANT_BYTES for n in (1, 2, 3))


def filled(*parts: tuple[bytes, int]) -> CachedBlocks:
    """Blocks 1, 2, 3, ... of these owners, the first the oldest."""
    cached, block_id = CachedBlocks(), 0
    for owner, count in parts:
        for _ in range(count):
            block_id += 1
            cached.add(block_id, owner)
    return cached


def test_one_tenant_is_least_recently_used_first() -> None:
    cached = filled((A, 4))
    cached.refresh(1)
    cached.remove(3)
    assert list(cached) == [2, 4, 1]
    assert [cached.pop() for _ in range(3)] == [2, 4, 1]
    assert len(cached) == 0


def test_a_flood_does_not_take_what_another_holds_within_its_share() -> None:
    cached = filled((A, 3), (B, 20))
    assert [cached.pop() for _ in range(16)] == list(range(4, 20)), "the oldest of b, though all of a is older"
    assert sorted(cached) == [1, 2, 3, 20, 21, 22, 23]


def test_what_a_tenant_holds_beyond_its_share_goes_first_if_it_is_the_oldest() -> None:
    cached = filled((A, 8), (B, 4))
    assert [cached.pop() for _ in range(4)] == [1, 2, 3, 4]


def test_shares_are_by_weight_and_a_salt_is_of_its_tenant() -> None:
    cached = filled((B, 10), (A + b"salt", 10), (A, 10))
    cached.weigh(A + b"salt", 3.0)
    for _ in range(10):
        cached.pop()
    left = list(cached)
    assert sum(block_id <= 10 for block_id in left) == 5, "a quarter of what is left"


def test_each_block_is_given_up_once_whatever_happens_before() -> None:
    rng, cached = random.Random(3), CachedBlocks()
    held: set[int] = set()
    for block_id in range(1, 400):
        cached.add(block_id, rng.choice((A, A, B, C)))
        held.add(block_id)
        for act in (cached.refresh, cached.remove):
            if rng.random() < 0.3 and held:
                chosen = rng.choice(sorted(held))
                act(chosen)
                held -= {chosen} if act == cached.remove else set()
        if rng.random() < 0.5 and held:
            held.remove(cached.pop())
        assert set(cached) == held
        assert len(cached) == len(held)
    while held:
        held.remove(cached.pop())
    assert not list(cached)
