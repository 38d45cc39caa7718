"""Buckets sum to wall time, whatever is done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.core.timed import State, Timed

LIVE = [state for state in State if state is not State.ENDED]


def test_time_goes_to_the_state_that_is_left() -> None:
    timed = Timed(State.WAIT_STEP_BOUNDARY, 100)
    timed.to(State.PREFILL, 130)
    timed.to(State.DECODE, 150)
    timed.to(State.ENDED, 155)
    assert timed.buckets_ns == {State.WAIT_STEP_BOUNDARY: 30, State.PREFILL: 20, State.DECODE: 5}
    assert timed.total_ns == 55


def test_split_charges_the_parts_and_the_rest_to_the_state_that_stays() -> None:
    timed = Timed(State.DECODE, 0)
    timed.split(100, [(State.ENGINE_GAP, 30), (State.PREFILL, 5)])
    assert timed.state is State.DECODE
    assert timed.buckets_ns == {State.ENGINE_GAP: 30, State.PREFILL: 5, State.DECODE: 65}


def test_time_does_not_go_back_and_nothing_follows_the_end() -> None:
    timed = Timed(State.DECODE, 10)
    with pytest.raises(AssertionError, match="-1 ns"):
        timed.to(State.PREFILL, 9)
    with pytest.raises(AssertionError, match="charged"):
        timed.split(20, [(State.ENGINE_GAP, 11)])
    ended = Timed(State.DECODE, 0)
    ended.to(State.ENDED, 1)
    with pytest.raises(AssertionError, match="after the end"):
        ended.to(State.DECODE, 2)
    with pytest.raises(AssertionError, match="after the end"):
        ended.split(2, [])


@given(
    st.lists(st.tuples(st.sampled_from(LIVE), st.integers(0, 10**12), st.lists(st.integers(0, 100), max_size=3))),
    st.integers(0, 10**15),
)
def test_buckets_sum_to_wall_time(moves: list[tuple[State, int, list[int]]], start_ns: int) -> None:
    timed, now_ns = Timed(State.WAIT_STEP_BOUNDARY, start_ns), start_ns
    for state, amount_ns, parts in moves:
        now_ns += amount_ns + sum(parts)
        timed.split(now_ns, [(State.ENGINE_GAP, part) for part in parts])
        now_ns += amount_ns
        timed.to(state, now_ns)
    timed.to(State.ENDED, now_ns + 7)
    assert sum(timed.buckets_ns.values()) == timed.total_ns == now_ns + 7 - start_ns


def test_every_state_is_waiting_resident_or_neither_but_not_both() -> None:
    assert not [state for state in State if state.waiting and state.resident]
    assert State.PREEMPTED.waiting and State.DECODE.resident and not State.OVERSHOOT.resident
