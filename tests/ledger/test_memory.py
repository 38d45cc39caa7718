"""Blocks partition the pool, slots the active blocks, bytes the pool, terms the device."""

from __future__ import annotations

import pytest

from steelyard.core.step import MemoryTerms
from steelyard.ledger.memory import Holding, device_bytes, pool_bytes, pool_use, table


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
    assert any("unaccounted" in line for line in table(MemoryTerms(1000)))
