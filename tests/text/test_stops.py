from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.sampling import SamplingParams
from steelyard.text.stops import StopIds, StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5, unique=True).map(tuple)


def first_completed(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The slow twin: tries every end, then every stop string, the longest first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return None


def longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    """How many last characters begin a stop string without being all of it."""
    return max(n for n in range(len(text) + 1) for s in stops if n < len(s) and text.endswith(s[:n]))


@given(STOPS, st.lists(st.text("abc", max_size=6), max_size=8))
@settings(max_examples=250)
def test_the_first_completed_match_wins_however_the_text_is_cut(stops: tuple[str, ...], parts: list[str]) -> None:
    matcher, before = StopMatcher(stops), 0
    expected = first_completed("".join(parts), stops)
    for part in parts:
        match = matcher.scan(part)
        if match:
            assert (before + match.end, match.stop) == expected
            return
        before += len(part)
        assert matcher.held == longest_beginning("".join(parts)[:before], stops)
    assert expected is None


@given(STOPS, st.text("abc", max_size=12), st.text("abc", max_size=12))
@settings(max_examples=150)
def test_unarmed_matches_are_passed_over_and_hold_nothing_back_for_themselves(
    stops: tuple[str, ...], early: str, late: str
) -> None:
    matcher = StopMatcher(stops)
    assert matcher.scan(early, armed=False) is None
    assert matcher.held == longest_beginning(early, stops)
    match = matcher.scan(late)
    ends = [e for e in range(len(early) + 1, len(early + late) + 1) if (early + late)[:e].endswith(stops)]
    assert (match.end + len(early) if match else None) == (ends[0] if ends else None)


def test_a_stop_string_inside_another_and_one_with_a_repeated_beginning() -> None:
    assert StopMatcher(("abcd", "bc")).scan("xabcd") is not None
    matcher = StopMatcher(("aab",))
    assert matcher.scan("aaa") is None
    assert matcher.held == 2
    match = matcher.scan("b")
    assert match and match.stop == "aab"


@pytest.mark.parametrize(
    ("sampling", "num_before", "stop_token", "shown"),
    [
        (SamplingParams(), 0, 2, [5]),
        (SamplingParams(), 0, None, [5]),
        (SamplingParams(min_tokens=9), 0, None, [5, 2]),
        (SamplingParams(min_tokens=9), 8, None, [5]),
        (SamplingParams(ignore_eos=True), 0, None, [5, 2]),
        (SamplingParams(ignore_eos=True), 0, 2, [5]),
        (SamplingParams(stop_token_ids=(5,)), 0, None, []),
        (SamplingParams(include_stop_str_in_output=True), 0, 2, [5, 2]),
    ],
)
def test_the_text_of_an_id_that_ends_the_answer_is_hidden_unless_asked_for(
    sampling: SamplingParams, num_before: int, stop_token: int | None, shown: list[int]
) -> None:
    assert StopIds.of(sampling, {2}).shown([5, 2], num_before, stop_token) == shown


def test_only_an_id_of_the_client_is_told_as_the_reason() -> None:
    stop_ids = StopIds.of(SamplingParams(stop_token_ids=(5,)), {2})
    assert [stop_ids.reason(token) for token in (5, 2, None)] == [5, None, None]
