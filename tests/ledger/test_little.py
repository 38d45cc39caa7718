"""Heads counted over time against time added up over heads: the same integer, in any order of reports."""

from __future__ import annotations

import random
from pathlib import Path

from steelyard.core.timed import State, Timed
from steelyard.ledger.little import COMPUTING_NAME, Census, merged
from steelyard.ledger.states import DESCRIPTIONS, GROUPS, group_of


class Watch:
    """Reports moves to a census."""

    def __init__(self, census: Census) -> None:
        self.census = census

    def moved(self, timed: Timed, old: State, at_ns: int) -> None:
        self.census.move(old, timed.state, at_ns)


def live(seed: int) -> tuple[Census, list[Timed], int]:
    rng, census, all_ = random.Random(seed), Census(), list[Timed]()
    states = [s for s in State if s is not State.ENDED]
    now = 0
    for _ in range(400):
        now += rng.randint(0, 50)
        if rng.random() < 0.3 or not all_:
            timed = Timed(rng.choice(states), now)
            census.come(timed.state, now)
            timed.watcher = Watch(census)
            all_.append(timed)
        else:
            timed = rng.choice(all_)
            if timed.state is not State.ENDED:
                timed.to(State.ENDED if rng.random() < 0.2 else rng.choice(states), rng.randint(timed.since_ns, now))
    return census, all_, now


def spent(all_: list[Timed], now: int) -> dict[str, int]:
    total: dict[State, int] = {}
    for timed in all_:
        for state, amount in timed.buckets_ns.items():
            total[state] = total.get(state, 0) + amount
        if timed.state is not State.ENDED:
            total[timed.state] = total.get(timed.state, 0) + now - timed.since_ns
    return merged(total)


def test_both_sides_are_the_same_integers() -> None:
    for seed in range(20):
        census, all_, now = live(seed)
        sides = spent(all_, now)
        assert sides == census.integral_ns(now)
        assert COMPUTING_NAME in sides and len(sides) > 10
        assert sum(census.number(s) for s in State) == sum(t.state is not State.ENDED for t in all_)


def test_a_move_that_is_not_reported_is_seen() -> None:
    census, all_, now = live(3)
    timed = next(t for t in all_ if t.state is not State.ENDED)
    timed.watcher = None
    timed.to(State.CLIENT_SLOW if timed.state is not State.CLIENT_SLOW else State.AUTH, timed.since_ns)
    assert spent(all_, now + 5) != census.integral_ns(now + 5)


def test_every_account_has_a_group_and_a_description() -> None:
    grouped = [state for states in GROUPS.values() for state in states]
    assert len(set(grouped)) == len(grouped)
    assert set(grouped) == set(State) - {State.ENDED, State.IN_ENGINE}
    assert set(DESCRIPTIONS) == set(State) - {State.ENDED}
    page = (Path(__file__).parents[2] / "docs" / "ledgers.md").read_text()
    for state in grouped:
        assert f"| `{state.value}` | {DESCRIPTIONS[state]} |" in page, "the page says what each account is"
    assert group_of("wait_kv") == "waiting" and group_of("nothing") == "other"
