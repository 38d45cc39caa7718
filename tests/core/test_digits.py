"""Numbers in tables are read, not decoded."""

from __future__ import annotations

import math

import pytest

from steelyard.core.digits import in_digits


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (15812.0, "15,812"), (1.58e7, "15,800,000"), (999.96, "1,000"), (999.94, "999.9"), (12.3456, "12.35"),
        (1, "1"), (0, "0"), (0.0, "0"), (0.0421, "0.0421"), (8.249e-06, "0.0000"), (0.0001234, "0.0001234"),
        (-1234.5, "-1,234"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_no_number_is_shown_with_a_power_of_ten(value: float, said: str) -> None:
    assert in_digits(value) == said and "e" not in said
