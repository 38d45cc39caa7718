"""The engine's process waits politely unless the user has said how threads wait."""

from __future__ import annotations

import pytest

from steelyard.engine.threads import with_short_spins


def test_a_short_spin_is_added_and_the_rest_kept() -> None:
    given = {"PATH": "/bin", "OMP_NUM_THREADS": "3"}
    assert with_short_spins(given) == given | {"GOMP_SPINCOUNT": "3000"}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_chose_stays(name: str) -> None:
    assert with_short_spins({name: "x"}) == {name: "x"}
