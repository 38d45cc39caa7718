"""Waste of reserving and of paging, replayed; every slot of every step is accounted for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import StartError
from steelyard.plan.fragmentation import (
    POLICIES,
    STORY,
    STORY_CAPACITY,
    FirstFit,
    Replay,
    block_choices,
    replay,
    sample_lengths,
)

CHAT = Replay(sample_lengths(300, 161, 338, max_len=2048, seed=7), 15_700, 2048)


def test_the_story_of_a_200_b_150_then_c_180() -> None:
    events = replay(STORY_CAPACITY, STORY)
    a, b, a_leaves, c, d = events
    assert (a.start, b.start) == (0, 200)
    assert a_leaves.holes == ((0, 200), (350, 150))
    assert c.start == 0
    assert c.holes == ((180, 20), (350, 150))
    assert d.failed
    assert d.num_free == 170 >= 165 > d.largest_hole == 150


def test_the_same_story_paged_serves_d() -> None:
    held = {}
    free = STORY_CAPACITY // 10
    for owner, size in STORY:
        if size == 0:
            free += held.pop(owner)
        else:
            held[owner] = -(-size // 10)
            free -= held[owner]
        assert free >= 0, owner
    assert set(held) == {"B", "C", "D"}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=80), st.integers(1, 200))
def test_first_fit_never_overlaps_and_takes_the_lowest_hole(events: list[tuple[int, int]], capacity: int) -> None:
    allocator = FirstFit(capacity)
    held: dict[str, range] = {}
    for number, size in events:
        owner = str(number)
        if owner in held:
            allocator.free(owner)
            del held[owner]
            continue
        used = {s for r in held.values() for s in r}
        lowest = next((s for s in range(capacity - size + 1) if not used & set(range(s, s + size))), None)
        start = allocator.allocate(owner, size)
        assert start == lowest
        if start is not None:
            held[owner] = range(start, start + size)
        assert allocator.num_free == capacity - sum(len(r) for r in held.values())
        assert sum(n for _, n in allocator.holes()) == allocator.num_free


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=25),
    st.integers(80, 300),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(POLICIES),
)
@settings(max_examples=80)
def test_every_slot_of_every_step_is_in_one_account(
    lengths: list[tuple[int, int]], capacity: int, block_size: int, policy: str
) -> None:
    use = Replay(tuple(lengths), capacity, 64, block_size).run(policy)  # type: ignore[arg-type]
    kinds = ("filled", "reserved", "internal", "external", "idle")
    assert sum(getattr(use, k) for k in kinds) == capacity * use.num_steps
    assert all(getattr(use, k) >= 0 for k in kinds)
    assert use.num_finished == len(lengths)
    if policy == "oracle":
        assert use.internal == 0
    if policy == "paged":
        assert use.external == 0
        assert use.internal + use.reserved <= (block_size - 1) * use.running_sum


def test_paging_fills_memory_where_reserving_does_not() -> None:
    """Order and size as published for these lengths (arXiv 2309.06180, figure 2): 20, 27, 38 and 96 percent."""
    uses = {p: CHAT.run(p) for p in POLICIES}
    filled = {p: u.share("filled") for p, u in uses.items()}
    assert filled["max"] < filled["pow2"] < filled["oracle"] < filled["paged"]
    assert filled["max"] < 0.30
    assert filled["paged"] > 2 * filled["pow2"]
    assert uses["paged"].share("internal") + uses["paged"].share("reserved") < 0.03
    assert uses["max"].share("internal") > 0.45
    assert uses["oracle"].external > 0
    assert uses["paged"].total_steps < uses["oracle"].total_steps < uses["max"].total_steps
    assert filled["paged"] > 0.9
    assert uses["paged"].mean_running > 2 * uses["max"].mean_running


def test_paging_preempts_when_blocks_run_out_and_still_finishes() -> None:
    use = Replay(((10, 90),) * 10, 200, 128, 16).run("paged")
    assert use.num_preempted > 0
    assert use.num_finished == 10


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(StartError, match="2048 slots of 1000"):
        Replay(((10, 10),), 1000, 2048).run("max")


def test_expected_waste_is_half_a_block_less_one_slot() -> None:
    lengths = list(range(1, 1025))
    for choice in block_choices(lengths, 2048):
        assert choice.waste_tokens == pytest.approx((choice.block_size - 1) / 2)
        assert choice.run_bytes == choice.block_size * 2048
    shares = [c.waste_share for c in block_choices(lengths, 2048)]
    assert shares == sorted(shares)
    assert shares[0] == 0.0


def test_sampled_lengths_are_deterministic_and_near_their_means() -> None:
    pairs = sample_lengths(4000, 161, 338, max_len=100_000, seed=3)
    assert pairs == sample_lengths(4000, 161, 338, max_len=100_000, seed=3)
    assert sum(p for p, _ in pairs) / 4000 == pytest.approx(161, rel=0.1)
    assert sum(o for _, o in pairs) / 4000 == pytest.approx(338, rel=0.1)
    assert set(sample_lengths(5, 100, 20, max_len=500, spread=0.0)) == {(100, 20)}
