"""Blocks partition the pool, slots the active blocks, bytes the pool, terms the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.core.step import MemoryTerms
from steelyard.ledger.memory import (
    MAX_UNACCOUNTED,
    Holding,
    cached_fates,
    device_bytes,
    is_accounted_for,
    pool_bytes,
    pool_use,
    start_table,
    unaccounted_share,
)


def test_every_kind_of_slot_is_counted_once() -> None:
    one = Holding([3, 4, 5], 9, [False, True])  # full, full, one slot of 4, and nothing reserved
    two = Holding([3, 0, 7, 8], 9)  # shares block 3; entry 1 lies behind a window; block 8 is reserved
    use = pool_use(20, 6, 9, 4, [one, two])
    use.check(4)
    assert (use.clean, use.cached, use.active) == (6, 9, 5)
    assert use.filled_slots == 4 + 4 + 1 + 1
    assert use.tail_slots == 3 + 3
    assert use.reserved_slots == 4
    assert (use.shared_blocks, use.duplicate_blocks) == (1, 1)
    parts = pool_bytes(use, 4, 1000)
    assert sum(parts.values()) == 21 * 1000
    assert parts["active_filled"] == 2500


def test_a_block_that_nobody_holds_is_noticed() -> None:
    with pytest.raises(AssertionError, match="slots"):
        pool_use(20, 6, 8, 4, [Holding([3], 4)]).check(4)


def test_the_devices_terms_sum_to_its_total() -> None:
    named = device_bytes(MemoryTerms(1000, 1, 200, 300, 40, 5, 6, 7, 400))
    assert named["unaccounted"] == 41
    assert sum(value for name, value in named.items() if name != "total") == named["total"] == 1000


TERMS = MemoryTerms(1000, 1, 200, 300, 40, 5, 6, 7, 430)


def test_terms_that_miss_the_total_are_noticed_either_way() -> None:
    assert is_accounted_for(TERMS) and unaccounted_share(TERMS) == 0.011
    for doctored in (replace(TERMS, free_bytes=420), replace(TERMS, weights_bytes=240)):
        assert not is_accounted_for(doctored) and abs(unaccounted_share(doctored)) > MAX_UNACCOUNTED
    assert is_accounted_for(MemoryTerms(0)) and unaccounted_share(MemoryTerms(0)) == 0.0


def test_what_became_of_cached_blocks_is_a_share() -> None:
    assert cached_fates(0, 0)["dead_share"] is None
    assert cached_fates(3, 1) == {"found_again": 3, "evicted": 1, "dead_share": 0.25}


def test_the_start_table_has_every_term_and_every_phase_and_their_sums() -> None:
    headings, *lines = start_table(TERMS, {"import": 1.5, "weights": 2.0, "other": 0.25})
    assert headings.split("  ")[0] == "held by" and headings.endswith("phase of the start")
    amounts = {line.split()[0]: int(line.split()[1].replace(",", "")) for line in lines}
    assert amounts.pop("total") == 1000 == sum(amounts.values())
    assert set(amounts) == set(device_bytes(TERMS)) - {"total"}
    assert lines[-1].endswith("3.75 s  in all")
    assert len({line.index("|") for line in (headings, *lines)}) == 1, "a rule parts memory from time in every line"
    assert [line.split(" s  ")[1] for line in lines if " s  " in line] == ["import", "weights", "other", "in all"]
    many = start_table(MemoryTerms(10), {f"p{i}": 1.0 for i in range(20)})
    assert len(many) == 22 and many[-1].endswith("20.00 s  in all")
