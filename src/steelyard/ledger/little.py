"""Little's law as an identity: the time all requests spent in a state is the integral of the number in it.

    sum over requests of time in s, clipped to [0, T]   ==   integral from 0 to T of N_s(t) dt        in integers

The right side is kept here, by counting heads: nothing here knows a request or its buckets. As a request that comes
into s at a adds T - a, and one that leaves at d takes T - d away, integral(T) = N_s * T - (sum of a - sum of d), so
the order in which moves are reported does not matter and one that is reported late is counted right.
"""

from __future__ import annotations

from collections.abc import Mapping

from steelyard.core.timed import State
from steelyard.ledger.states import COMPUTING

COMPUTING_NAME = "computing"
"""Prefill, decode, recompute and the gaps between steps, counted as one: a gap is divided only when it is over."""


class Census:
    """How many are in each state, and the integral of that number."""

    def __init__(self) -> None:
        self._number: dict[State, int] = dict.fromkeys(State, 0)
        self._moment: dict[State, int] = dict.fromkeys(State, 0)

    def come(self, state: State, at_ns: int) -> None:
        self._number[state] += 1
        self._moment[state] += at_ns

    def move(self, old: State, new: State, at_ns: int) -> None:
        number, moment = self._number, self._moment
        number[old] -= 1
        moment[old] -= at_ns
        if new is not State.ENDED:
            number[new] += 1
            moment[new] += at_ns

    def number(self, state: State) -> int:
        return self._number[state]

    def integral_ns(self, now_ns: int) -> dict[str, int]:
        """By state, those of COMPUTING as one; what was never entered is left out."""
        found = {s: self._number[s] * now_ns - self._moment[s] for s in State}
        return merged(found)


def merged(amounts_ns: Mapping[State, int]) -> dict[str, int]:
    """Amounts by name with the COMPUTING states as one; zeros left out."""
    found: dict[str, int] = {}
    for state, amount_ns in amounts_ns.items():
        name = COMPUTING_NAME if state in COMPUTING else state.value
        found[name] = found.get(name, 0) + amount_ns
    return {name: amount_ns for name, amount_ns in found.items() if amount_ns}
