"""Every reported fault is tested here, held elsewhere, or named with why it cannot arise: exactly one of them."""

from __future__ import annotations

from collections import Counter

from tests.cases.case_list import CASES, ELSEWHERE, INAPPLICABLE, ids_tested


def test_every_case_is_tested_or_named() -> None:
    here = ids_tested()
    assert here | set(INAPPLICABLE) | set(ELSEWHERE) == set(CASES)
    counts = Counter([*here, *INAPPLICABLE, *ELSEWHERE])
    assert [case for case, count in counts.items() if count > 1] == []
