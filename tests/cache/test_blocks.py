"""Reference counts and the order in which free blocks are taken."""

from __future__ import annotations

import pytest

from steelyard.cache.blocks import NULL_BLOCK, BlockPool


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_clean_blocks_are_taken_before_cached_ones_and_those_least_recently_used_first() -> None:
    pool = BlockPool(4)
    a, b, c, d = pool.take(4)
    for i, block_id in enumerate((a, b, c)):
        pool.publish(block_id, key(i), b"")
    pool.free([b, a, d, c])
    assert (pool.num_clean, pool.num_cached, pool.num_free) == (1, 3, 4)
    assert [pool.take(1)[0] for _ in range(4)] == [d, b, a, c]
    assert all(pool.index.get(key(i)) is None for i in range(3)), "what is taken is no longer found"


def test_a_touched_block_leaves_the_line_and_comes_back_at_its_end() -> None:
    pool = BlockPool(2)
    a, b = pool.take(2)
    pool.publish(a, key(1), b"")
    pool.publish(b, key(2), b"")
    pool.free([a, b])
    pool.touch(a)
    assert pool.num_free == 1 and pool.refs(a) == 1
    assert pool.free([a]) == 1
    assert pool.take(2) == [b, a]


def test_each_cached_block_is_found_again_or_evicted_or_still_there() -> None:
    pool = BlockPool(4)
    blocks = pool.take(4)
    for i, block_id in enumerate(blocks):
        pool.publish(block_id, bytes([i]), b"")
    pool.free(blocks)
    pool.touch(blocks[3])
    pool.take(2)
    assert (pool.num_found_again, pool.num_evicted, pool.num_cached) == (1, 2, 1)
    pool.touch(blocks[3])
    assert pool.num_found_again == 1


def test_a_shared_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(1)
    [a] = pool.take(1)
    pool.touch(a)
    assert pool.free([a]) == 0 and pool.num_free == 0
    assert pool.free([a]) == 1 and pool.num_free == 1


def test_k05_freeing_twice_is_our_bug_and_changes_nothing() -> None:
    pool = BlockPool(2)
    [a] = pool.take(1)
    pool.free([a])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([a])
    assert pool.num_free == pool.num_blocks == 2
    pool.check({})


def test_the_null_block_is_never_given_and_never_counted() -> None:
    pool = BlockPool(3)
    assert NULL_BLOCK not in pool.take(3)
    assert pool.free([NULL_BLOCK, NULL_BLOCK]) == 0
    pool.check({1: 1, 2: 1, 3: 1})


def test_taking_more_than_there_is_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="3 blocks asked of 2 free"):
        BlockPool(2).take(3)


def test_a_second_block_with_the_same_contents_stays_private() -> None:
    pool = BlockPool(2)
    a, b = pool.take(2)
    pool.publish(a, key(1), b"")
    pool.publish(b, key(1), b"")
    assert pool.index.get(key(1)) == a
    pool.free([a, b])
    assert (pool.num_clean, pool.num_cached) == (1, 1)


def test_forgetting_a_namespace_cleans_its_free_blocks_and_hides_its_active_ones() -> None:
    pool = BlockPool(3)
    a, b, c = pool.take(3)
    pool.publish(a, key(1), b"x")
    pool.publish(b, key(2), b"x")
    pool.publish(c, key(3), b"y")
    pool.free([a, c])
    assert pool.forget(b"x") == 2
    assert (pool.num_clean, pool.num_cached) == (1, 1)
    assert pool.index.get(key(2)) is None and pool.index.get(key(3)) == c
    pool.check({b: 1})
    assert pool.forget(None) == 1


@pytest.mark.parametrize("damage", ["refs", "clean", "index"])
def test_check_sees_damage(damage: str) -> None:
    pool = BlockPool(2)
    [a] = pool.take(1)
    pool.check({a: 1})
    if damage == "refs":
        pool._refs[a] = 2
    elif damage == "clean":
        pool._clean.append(a)
    else:
        pool.publish(a, key(1), b"")
        pool.index._block_of.clear()
    with pytest.raises(AssertionError):
        pool.check({a: 1})
