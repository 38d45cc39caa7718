"""A static batch holds what its longest members need, in every row, to the end."""

from __future__ import annotations

import pytest

from steelyard.perf.padded_batch import KvHeld, static_samples


def test_every_row_is_held_to_the_longest_and_needed_only_while_it_lives() -> None:
    assert static_samples([(4, 3), (2, 1)]) == [(8, 6), (10, 5), (12, 6)]
    assert static_samples([(4, 3)]) == [(4, 4), (5, 5), (6, 6)]  # alone, nothing is wasted


def test_the_peak_is_told_with_what_it_was_needed_for_and_the_mean_is_over_steps() -> None:
    found = KvHeld.of(static_samples([(4, 3), (2, 1)]))
    assert (found.peak, found.peak_needed, found.most_needed) == (12, 6, 6)
    assert found.mean_share == pytest.approx(17 / 30)
    in_bytes = found.scaled(100.0)
    assert (in_bytes.peak, in_bytes.peak_needed, in_bytes.mean_share) == (1200.0, 600.0, found.mean_share)
    with pytest.raises(AssertionError, match="nothing"):
        KvHeld.of([(0, 0)])
