"""Match, grow, fork, commit, slide, release on one or two requests at a time."""

from __future__ import annotations

import pytest

from steelyard.cache.contiguous import whole_request
from steelyard.cache.manager import CacheManager
from steelyard.core.hashing import chain, root_hash
from steelyard.core.request import Request
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import Copy, KvGroup, RunnerCaps, TableEdit

Window = int | tuple[int, int] | None
"""Of a group; a pair is a window and how many first positions are kept behind it."""


def make_manager(num_blocks: int = 8, windows: tuple[Window, ...] = (None,), caching: bool = True) -> CacheManager:
    caps = RunnerCaps(
        block_size=4,
        num_blocks=(num_blocks,) * len(windows),
        groups=tuple(KvGroup(1, *(w if isinstance(w, tuple) else (w,))) for w in windows),
        max_rows=8,
        max_model_len=1000,
        max_batched_tokens=100,
        vocab_size=1000,
        overlaps=False,
        fingerprint="m",
        kv_layout="l",
    )
    return CacheManager(caps, caching)


def make_request(tokens: list[int], row: int = 0, namespace: bytes = b"", **sampling: int) -> Request:
    request = Request(f"r{row}", tokens, SamplingParams(seed=0, **sampling), 0, namespace=namespace)
    request.row = row
    return request


def compute(manager: CacheManager, request: Request) -> None:
    """Admit, compute and commit all that is known of a request."""
    hit = manager.match(request)
    assert manager.grow(request, len(request.tokens), hit_tokens=hit) is not None
    request.num_computed = len(request.tokens)
    manager.commit(request, len(request.tokens))


def numbers(count: int) -> list[int]:
    return list(range(1, count + 1))


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_match_is_whole_blocks_and_leaves_at_least_one_token(length: int, hit: int) -> None:
    manager = make_manager()
    first = make_request(numbers(length))
    compute(manager, first)
    manager.release(first)
    assert manager.match(make_request(numbers(length))) == hit


def test_a_match_ends_at_the_first_block_that_differs() -> None:
    manager = make_manager()
    first = make_request(numbers(16))
    compute(manager, first)
    assert manager.match(make_request([*numbers(8), 99, *numbers(16)[9:], 1])) == 8
    assert manager.match(make_request([99, *numbers(16)[1:]])) == 0


def test_nothing_matches_another_namespace_a_request_for_prompt_logprobs_or_a_cache_that_is_off() -> None:
    manager = make_manager()
    compute(manager, make_request(numbers(9), namespace=b"a"))
    assert manager.match(make_request(numbers(9), namespace=b"a")) == 8
    assert manager.match(make_request(numbers(9), namespace=b"b")) == 0
    assert manager.match(make_request(numbers(9), namespace=b"a", prompt_logprobs=0)) == 0
    off = make_manager(caching=False)
    compute(off, make_request(numbers(9)))
    assert off.match(make_request(numbers(9))) == 0


def test_hashes_brought_by_the_request_are_used_and_completed() -> None:
    manager = make_manager()
    compute(manager, make_request(numbers(13)))
    keys = chain(root_hash("m", "l"), numbers(13), 4)
    other = make_request(numbers(13))
    other.block_hashes = keys[:1]
    assert manager.match(other) == 12 and other.block_hashes == keys


def test_grow_returns_the_edits_of_new_entries_and_shares_what_was_matched() -> None:
    manager = make_manager()
    first, second = make_request(numbers(9)), make_request(numbers(9), row=1)
    compute(manager, first)
    shared = list(manager.tables(first)[0][:2])
    edits = manager.grow(second, 9, hit_tokens=manager.match(second))
    own = manager.tables(second)[0][2]
    assert edits == [TableEdit(0, 1, 0, (*shared, own))]
    assert manager.grow(second, 12) == []
    assert manager.grow(second, 13) == [TableEdit(0, 1, 3, (manager.tables(second)[0][3],))]
    assert not manager.may_write(second, 7, 9) and manager.may_write(second, 8, 13)
    manager.check()


@pytest.mark.parametrize("spare", [0, 2])
def test_a_growth_that_does_not_fit_changes_nothing(spare: int) -> None:
    manager = make_manager(num_blocks=4)
    first = make_request(numbers(9))
    compute(manager, first)
    manager.release(first)
    before = manager.usage()
    second = make_request(numbers(30), row=1)
    hit = manager.match(second)
    assert hit == 8
    assert manager.grow(second, 17 - 4 * spare, hit_tokens=hit, spare_blocks=spare) is None
    assert manager.usage() == before and not manager.tables(second)
    assert manager.match(second) == 8, "what was matched is still cached"
    assert manager.grow(second, 16 - 4 * spare, hit_tokens=hit, spare_blocks=spare) is not None
    manager.check()


def test_a_growth_never_evicts_the_blocks_it_has_matched() -> None:
    manager = make_manager(num_blocks=4)
    first = make_request(numbers(9))
    compute(manager, first)
    hit_blocks = list(manager.tables(first)[0][:2])
    manager.release(first)
    second = make_request(numbers(16), row=1)
    manager.grow(second, 16, hit_tokens=manager.match(second))
    assert manager.tables(second)[0][:2] == hit_blocks and len(set(manager.tables(second)[0])) == 4


def test_release_is_idempotent_and_evicts_the_end_of_a_chain_before_its_start() -> None:
    manager = make_manager(num_blocks=4)
    first = make_request(numbers(17)[:16])
    compute(manager, first)
    assert manager.release(first) == 4 and manager.release(first) == 0
    other = make_request([99] * 8, row=1)
    manager.grow(other, 8)
    assert manager.match(make_request(numbers(17))) == 8
    manager.check()


@pytest.mark.parametrize(("at", "num_shared", "num_copies"), [(3, 0, 1), (4, 1, 0), (5, 1, 1), (8, 2, 0), (11, 2, 1)])
def test_fork_shares_full_blocks_and_copies_one_partial_one(at: int, num_shared: int, num_copies: int) -> None:
    manager = make_manager()
    parent, child = make_request(numbers(12)), make_request(numbers(at + 1), row=1)
    compute(manager, parent)
    copies = manager.fork(parent, child, at)
    source, table = manager.tables(parent)[0], manager.tables(child)[0]
    assert len(table) == num_shared + num_copies
    assert list(table[:num_shared]) == list(source[:num_shared])
    assert copies == [Copy(0, source[num_shared], table[-1])] * num_copies
    assert manager.grow(child, at + 1) is not None
    assert manager.may_write(child, at, at + 1)
    manager.check()
    manager.release(parent)
    manager.check()


def test_a_fork_without_room_for_the_copy_changes_nothing() -> None:
    manager = make_manager(num_blocks=2)
    parent, child = make_request(numbers(6)), make_request(numbers(6), row=1)
    compute(manager, parent)
    assert manager.fork(parent, child, 5) is None
    assert not manager.tables(child)
    assert manager.fork(parent, child, 4) is not None, "no copy is needed at a block's end"


def test_commit_publishes_full_blocks_only_and_only_what_it_is_told() -> None:
    manager = make_manager()
    request = make_request(numbers(12))
    manager.grow(request, 12)
    manager.commit(request, 7)
    assert manager.match(make_request(numbers(13))) == 4
    manager.commit(request, 12)
    assert manager.match(make_request(numbers(13))) == 12
    manager.check()


def test_drop_forgets_a_namespace_and_its_running_requests_publish_no_more() -> None:
    manager = make_manager()
    running, other = make_request(numbers(12), namespace=b"a"), make_request(numbers(5), row=1, namespace=b"b")
    manager.grow(running, 12)
    manager.commit(running, 8)
    compute(manager, other)
    assert manager.drop(b"a") == 2
    manager.commit(running, 12)
    assert manager.match(make_request(numbers(13), namespace=b"a")) == 0
    assert manager.match(make_request(numbers(5), namespace=b"b")) == 4
    manager.release(running)
    assert manager.drop() == 1
    assert manager.usage().cached == 0
    manager.check()


def test_slide_frees_what_no_later_query_sees_and_nothing_else() -> None:
    manager = make_manager(windows=(None, 6))
    request = make_request(numbers(20))
    compute(manager, request)
    assert manager.slide(request, 8) == []  # a query at 8 sees positions 3 .. 8
    edits = manager.slide(request, 13)  # sees 8 .. 13
    assert edits == [TableEdit(1, 0, 0, (0, 0))]
    assert manager.slide(request, 13) == []
    assert list(manager.tables(request)[1][:3])[:2] == [0, 0] and 0 not in manager.tables(request)[0]
    manager.check()
    manager.release(request)
    assert manager.usage().active == 0


def test_a_hit_needs_the_window_groups_only_over_their_last_window() -> None:
    manager = make_manager(num_blocks=5, windows=(6,))
    first = make_request(numbers(20))
    compute(manager, first)
    manager.slide(first, 20)  # a query at 20 sees 15 .. 20: blocks 0, 1 and 2 are free, and still cached
    assert manager.match(make_request(numbers(14), row=2)) == 12
    taken = make_request([7] * 12, row=1)
    assert manager.grow(taken, 12) is not None  # evicts them
    assert manager.match(make_request(numbers(21), row=2)) == 20, "the last window is still there"
    assert manager.match(make_request(numbers(14), row=2)) == 0, "a query at 12 would see 7 .. 12"
    manager.release(taken)
    second = make_request(numbers(21), row=2)
    edits = manager.grow(second, 21, hit_tokens=manager.match(second))
    assert edits is not None and edits[0].block_ids[:3] == (0, 0, 0)
    manager.check()


def test_blocks_of_the_first_positions_stay_behind_the_window_and_a_hit_needs_them() -> None:
    manager = make_manager(num_blocks=6, windows=((6, 5),))
    first = make_request(numbers(20))
    compute(manager, first)
    edits = manager.slide(first, 20)  # a query at 20 sees 0 .. 4 and 15 .. 20: block 2 alone is free
    assert edits == [TableEdit(0, 0, 2, (0,))]
    table = list(manager.tables(first)[0])
    assert table[2] == 0 and all(table[:2] + table[3:])
    manager.check()
    fork = make_request(numbers(20), row=1)
    assert manager.can_fork(first, 18)
    copies = manager.fork(first, fork, 18)
    assert copies is not None and [c.src_block for c in copies] == [table[4]]
    assert list(manager.tables(fork)[0][:4]) == [*table[:2], 0, table[3]]
    manager.check()
    manager.release(fork)
    manager.release(first)
    again = make_request(numbers(21), row=2)
    assert manager.match(again) == 20
    [edit] = manager.grow(again, 21, hit_tokens=20) or []
    assert edit.block_ids[:4] == (*table[:2], 0, table[3]), "the kept ones are shared"
    manager.check()
    manager.release(again)
    other = make_request([7] * 8, row=3)
    assert manager.grow(other, 8) is not None and manager.grow(other, 16) is not None  # evicts the first ones last
    manager.check()


def test_a_hit_without_the_kept_blocks_is_none() -> None:
    manager = make_manager(num_blocks=9, windows=((6, 5),))
    first = make_request(numbers(20))
    compute(manager, first)
    assert manager.match(make_request(numbers(21), row=1)) == 20
    manager._pools[0].index.remove(manager.tables(first)[0][0])
    assert manager.match(make_request(numbers(21), row=1)) == 0


def test_a_request_holds_the_window_and_the_kept_blocks_and_no_more() -> None:
    manager = make_manager(num_blocks=6, windows=((8, 5),))
    assert manager.ever_fits(10_000) and not make_manager(num_blocks=4, windows=((8, 5),)).ever_fits(100)
    request = make_request(numbers(3))
    assert manager.grow(request, 3) is not None
    most = 0
    for end in range(4, 400):
        assert manager.grow(request, end) is not None
        request.num_computed = end
        manager.commit(request, end) if end <= len(request.tokens) else None
        manager.slide(request, end)
        most = max(most, manager.usage().active)
        manager.check()
    assert most == 2 + 3  # ceil(5 / 4) kept, and a window of 8 over at most three blocks


def test_ever_fits_and_capacity_count_a_window_as_a_window() -> None:
    full, window, both = make_manager(), make_manager(windows=(8,)), make_manager(num_blocks=3, windows=(None, 4))
    assert full.ever_fits(32) and not full.ever_fits(33) and full.capacity_tokens() == 32
    assert window.ever_fits(10_000) and window.capacity_tokens() == 1000
    assert both.capacity_tokens() == 12
    assert not make_manager(num_blocks=2, windows=(8,)).ever_fits(12)
    assert make_manager(num_blocks=3, windows=(9,)).capacity_tokens() == 1000  # 9 positions lie in 3 blocks of 4
    assert make_manager(num_blocks=3, windows=(10,)).capacity_tokens() == 12  # 10 may lie in 4


def test_a_window_saves_nothing_where_a_request_has_all_its_blocks_at_once() -> None:
    window = make_manager(windows=(8,))
    assert window.ever_fits(32, at_once=True) and not window.ever_fits(33, at_once=True)
    assert window.capacity_tokens(at_once=True) == 32
    caps = make_manager(windows=(None, 8))._caps
    reserving = CacheManager(caps, enable_prefix_caching=False, reserve=whole_request)
    assert reserving.capacity_tokens() == 32 and not reserving.ever_fits(33)


def test_usage_adds_up_and_counts_slack() -> None:
    manager = make_manager()
    first, second = make_request(numbers(9)), make_request([50] * 3, row=1)
    compute(manager, first)
    compute(manager, second)
    usage = manager.usage()
    assert (usage.total, usage.free, usage.clean, usage.cached, usage.active) == (8, 4, 4, 0, 4)
    assert usage.slack_tokens == 3 + 1
    manager.release(first)
    usage = manager.usage()
    assert (usage.free, usage.clean, usage.cached, usage.active) == (7, 5, 2, 1)


def test_check_sees_a_table_that_holds_a_free_block() -> None:
    manager = make_manager()
    request = make_request(numbers(9))
    compute(manager, request)
    manager._pools[0].free([manager.tables(request)[0][2]])
    with pytest.raises(AssertionError, match="0 references, tables have 1"):
        manager.check()
