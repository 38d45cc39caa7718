"""The engine's ledgers under a storm: tokens, shares, gaps, blocks and Little's law, exact for every outcome."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.step import KvGroup
from steelyard.core.timed import State, Timed
from steelyard.ledger.accounts import Accounts
from steelyard.ledger.book import CPU_LATE, NO_WORK, StepBook
from steelyard.scheduler.protocols import Faults
from steelyard.wire.messages import Ask
from tests.engine.engine_harness import STEP_NS, Harness


def ask(harness: Harness, what: str) -> Any:
    return harness.engine.ask(Ask("q", what)).value


def outcomes(overlap: bool, seed: int = 1, num_requests: int = 40, **options: Any) -> Harness:
    """Requests of many kinds, some stopped early, some with a stop string, some failing, some refused."""
    options.setdefault("num_blocks", (40,))
    rng = random.Random(seed)
    failing = {"r7", "r21"}
    harness = Harness(
        overlap=overlap,
        fail=lambda plan, work: "not a number" if rng.random() < 0.006 else None,
        faults=_FirstTokens(failing),
        **options,
    )
    shared = [rng.randrange(1000) for _ in range(24)]
    waiting = [f"r{i}" for i in range(num_requests)]
    while waiting or harness.engine.has_work:
        while waiting and rng.random() < 0.5:
            id = waiting.pop(0)
            tokens = (shared if rng.random() < 0.5 else []) + [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
            harness.submit(id, tokens, max_tokens=rng.randint(1, 40), n=rng.choice([1, 1, 2, 3]), seed=1)
            if rng.random() < 0.2:
                harness.try_submit(f"too long {id}", [1] * 150, max_tokens=200)
        live = list(harness.engine.live_requests())
        if live and rng.random() < 0.03:
            request = rng.choice(live)
            keep = rng.randint(0, request.num_generated) if rng.random() < 0.6 else -1
            harness.stop(request.id, request.index, "stop_string" if keep >= 0 else "disconnect", keep)
        if rng.random() < 0.02:
            harness.clock.advance(rng.randint(0, 10**7))
        harness.step()
        weigh(harness)
    harness.assert_clean()
    return harness


class _FirstTokens(Faults):
    def __init__(self, ids: set[str]) -> None:
        self.ids = ids

    def before_first_token(self, request: Any) -> str | None:
        return "it is said to fail" if request.id in self.ids else None


def weigh(harness: Harness) -> None:
    """Everything that must hold at every moment."""
    book = harness.engine.ledgers.book
    for entry in list(book.entries)[-2:]:
        assert int(entry.shares_ns.sum()) + entry.engine_ns == entry.device_ns
        assert entry.shares_ns.min() >= 0 and entry.engine_ns >= 0
    little = ask(harness, "little")
    assert all(state["difference_ns"] == 0 for state in little["states"].values()), little
    for pool in ask(harness, "memory")["pools"]:
        assert pool["clean"] + pool["cached"] + pool["active"] == pool["num_blocks"]
    device = little["device"]
    assert device["busy_ns"] == device["requests_ns"] + device["engine_ns"]
    assert device["requests_ns"] == device["closed_cost_ns"] + device["live_cost_ns"]
    assert device["utilisation"] == pytest.approx(device["throughput_times_cost"])


def check_steps(harness: Harness) -> None:
    book = harness.engine.ledgers.book
    entries = list(book.entries)
    assert sum(e.span_ns for e in entries) == entries[-1].commit_ns - book.start_ns
    assert sum(e.device_ns for e in entries) == book.totals.device_ns
    assert all(e.span_ns >= e.device_ns for e in entries)


def check_tokens(harness: Harness) -> None:
    """Each position computed is one of: prompt, a token's input, computed again, beyond the end, lost by a failure."""
    accounts = harness.engine.ledgers.accounts
    for key, end in harness.ends.items():
        [account] = [a for a in accounts.of(key[0]) if a.request.key == key]
        tokens, request = account.tokens(), account.request
        num_emitted = len(harness.ids.get(key, []))
        prompt = min(request.prompt_len, max(request.num_computed, request.recompute_until))
        inputs = max(num_emitted - 1, 0)  # the last token is nobody's input
        in_flight_at_the_end = tokens["overshoot"] - (num_emitted - tokens["generated"])
        come_by = tokens["cached"] + tokens["shared"]
        parts = prompt - come_by + inputs + tokens["recomputed"] + in_flight_at_the_end + tokens["lost"]
        assert tokens["computed"] == parts, (key, end.reason, tokens)


@pytest.mark.parametrize("num_host_blocks", [(), (60,)], ids=["recompute", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_outcome_is_accounted_for_to_the_nanosecond_and_the_token(
    overlap: bool, num_host_blocks: tuple[int, ...]
) -> None:
    harness = outcomes(overlap, num_host_blocks=num_host_blocks)
    counters = harness.scheduler.counters
    assert (counters.swaps_in > 0) == bool(num_host_blocks) and counters.swaps_in <= counters.swaps_out
    reasons = {end.reason for end in harness.ends.values()}
    assert reasons == {"length", "stop", "abort", "error"}
    assert counters.preemptions > 0 and counters.forks > 0 and counters.prefix_hits_tokens > 0
    check_steps(harness)
    check_tokens(harness)
    book = harness.engine.ledgers.book
    assert book.rates.is_known
    assert set(book.totals.gaps_ns) == {CPU_LATE, NO_WORK} or set(book.totals.gaps_ns) == {CPU_LATE}
    everyone = [a for key in harness.ends for a in harness.engine.ledgers.accounts.of(key[0]) if a.request.key == key]
    assert sum(a.computed_tokens for a in everyone) == book.totals.num_tokens
    assert sum(a.cost_ns for a in everyone) == book.totals.requests_ns
    assert any(a.lost_tokens for a in everyone) and any(a.shared_tokens for a in everyone)
    for account in everyone:
        final = account.as_dict(harness.clock.now_ns)
        assert sum(final["buckets_ns"].values()) == final["total_ns"] == account.request.total_ns


LAYERS = {"full": (KvGroup(1),), "windowed": (KvGroup(1), KvGroup(1, 8))}


def all_laws(overlap: bool, layers: str, seed: int) -> Counter[str]:
    """A storm in which every law is held at every step and at the end; what happened in it."""
    groups = LAYERS[layers]
    harness = outcomes(overlap, seed, 20, groups=groups, num_blocks=(33,) * len(groups))
    check_steps(harness)
    check_tokens(harness)
    accounts, totals = harness.engine.ledgers.accounts, harness.engine.ledgers.book.totals
    everyone = [a for key in harness.ends for a in accounts.of(key[0]) if a.request.key == key]
    assert sum(a.computed_tokens for a in everyone) == totals.num_tokens
    assert sum(a.cost_ns for a in everyone) == totals.requests_ns
    for account in everyone:
        assert sum(account.request.buckets_ns.values()) == account.request.total_ns
    happened = Counter({name: sum(a.tokens()[name] for a in everyone) for name in everyone[0].tokens()})
    counters = harness.scheduler.counters
    return happened + Counter({"preemptions": counters.preemptions, "forks": counters.forks})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layers", LAYERS)
def test_the_laws_hold_over_windows_forks_preemption_and_overlap(overlap: bool, layers: str) -> None:
    happened = all_laws(overlap, layers, 2)
    wanted = ("preemptions", "forks", "recomputed", "shared", "cached", "overshoot", "lost")
    assert all(happened[name] > 0 for name in wanted), happened


@pytest.mark.slow
@settings(max_examples=60)
@given(st.booleans(), st.sampled_from(sorted(LAYERS)), st.integers(0, 2**32))
def test_the_laws_hold_in_any_storm(overlap: bool, layers: str, seed: int) -> None:
    all_laws(overlap, layers, seed)


def test_each_step_says_how_its_pool_was_cut_up() -> None:
    harness = Harness()
    harness.submit("a", list(range(10)), max_tokens=6)
    harness.submit("b", list(range(500, 507)), max_tokens=6)
    harness.run()
    steps = ask(harness, "steps 100")
    for step in steps:
        [pool] = step["pools"]
        assert pool["clean"] + pool["cached"] + pool["active"] == 64
        assert pool["active"] == pool["row_blocks"] + pool["spare_blocks"]
        assert 0 <= pool["tail_slots"] == pool["row_blocks"] * 4 - step["context_tokens"]
    first = steps[0]["pools"][0]
    assert first["row_blocks"] == 3 + 2 and first["tail_slots"] == 3 * 4 - 10 + 2 * 4 - 7


def test_a_request_that_was_refused_is_closed_and_counted() -> None:
    harness = Harness()
    harness.try_submit("x", [1] * 150, max_tokens=200)
    accounts = harness.engine.ledgers.accounts
    assert accounts.num_closed == 1 and not accounts.live
    [account] = accounts.of("x")
    assert account.request.state is State.ENDED and account.computed_tokens == 0
    harness.clock.advance(10)
    weigh(harness)


def test_gaps_are_named_by_who_was_late() -> None:
    harness = Harness()
    harness.clock.advance(5_000)
    harness.submit("a", [1, 2, 3], max_tokens=1)
    harness.clock.advance(1_000_000)
    harness.run()
    [entry] = harness.engine.ledgers.book.entries
    assert entry.gaps_ns == {NO_WORK: 5_000, CPU_LATE: 1_000_000 + STEP_NS // 7 - STEP_NS // 3}
    start_ns = harness.engine.ledgers.book.start_ns
    assert sum(entry.gaps_ns.values()) + entry.device_ns == entry.commit_ns - start_ns


def test_the_cost_in_finished_is_what_its_steps_charged() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], max_tokens=5)
    harness.submit("b", [4] * 9, max_tokens=3, n=2)
    harness.run()
    charged: dict[tuple[str, int], int] = {}
    for step in ask(harness, "steps 1000"):
        shares = ask(harness, f"step {step['id']}")["shares"]
        assert sum(share["cost_ns"] for share in shares) == step["requests_ns"]
        for share in shares:
            key = (share["request"], share["index"])
            charged[key] = charged.get(key, 0) + share["cost_ns"]
    assert charged == {key: end.cost_ns for key, end in harness.ends.items()}
    assert all(cost > 0 for cost in charged.values()) and len(charged) == 3


def test_a_request_is_explained_by_its_slowest_steps() -> None:
    harness = Harness()
    harness.submit("long", [5] * 20, max_tokens=80)
    for _ in range(70):
        harness.step()
    harness.submit("other", list(range(30)), max_tokens=2)
    harness.run()
    [choice] = ask(harness, "request long")
    assert choice["total_ns"] == sum(choice["buckets_ns"].values())
    for step in choice["slowest_steps"]:
        parts = step["causes"]
        assert sum(v for name, v in parts.items() if name.endswith("_ns")) == step["device_ns"]
    assert ask(harness, "request nobody") == []
    assert ask(harness, "step 99999") is None


def test_a_step_is_written_down_when_the_device_has_begun_it(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, order = Harness(), list[str]()
    for owner, name in ((harness.runner, "runner"), (harness.engine.ledgers, "ledgers")):
        method = "launch" if name == "runner" else "launched"
        call = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *given, call=call, name=name: (order.append(name), call(*given))[1])
    harness.submit("a", [1, 2, 3], max_tokens=4)
    harness.run()
    assert order == ["runner", "ledgers"] * 4


def test_a_step_from_before_there_were_rates_is_explained_by_those_of_now() -> None:
    harness = Harness()
    harness.submit("early", [5] * 20, max_tokens=10)
    harness.run()
    [before] = ask(harness, "request early")[0]["slowest_steps"][:1]
    assert before["causes"]["residual_ns"] == before["device_ns"] > 0
    harness.submit("later", [5] * 20, max_tokens=100)
    harness.run()
    [now] = ask(harness, "request early")[0]["slowest_steps"][:1]
    assert now["id"] == before["id"] and now["expected_ns"] is None and now["rates"].startswith("fitted")
    assert now["causes"]["own_ns"] > 0
    assert sum(v for name, v in now["causes"].items() if name.endswith("_ns")) == now["device_ns"]


def test_live_requests_and_the_block_map_are_shown_while_they_run() -> None:
    harness = Harness()
    harness.submit("a", list(range(30)), max_tokens=20, n=2)
    for _ in range(5):
        harness.step()
    live = ask(harness, "requests")
    assert {r["index"] for r in live} == {0, 1}
    assert all(r["total_ns"] == harness.clock.now_ns - harness.submitted_ns["a"] for r in live)
    cells = ask(harness, "blocks")["cells"]
    assert len(cells) == 64 and cells.count("3") == 7 and cells.count("2") > 0
    pool = ask(harness, "memory")["pools"][0]
    assert pool["shared_blocks"] == 7
    assert cells.count("2") + cells.count("3") == pool["active"]


def drop_a_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves into `preempted` are forgotten by whoever counts heads."""
    moved = Accounts.moved

    def skip(self: Accounts, timed: Timed, old: State, at_ns: int) -> None:
        if timed.state is not State.PREEMPTED:
            moved(self, timed, old, at_ns)

    monkeypatch.setattr(Accounts, "moved", skip)


def count_a_step_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_up = StepBook._sum
    monkeypatch.setattr(StepBook, "_sum", lambda self, *args: (sum_up(self, *args), sum_up(self, *args))[0])


def swap_two_states(monkeypatch: pytest.MonkeyPatch) -> None:
    charge = Timed._charge
    other = {State.WAIT_KV: State.WAIT_SLOT, State.WAIT_SLOT: State.WAIT_KV}
    monkeypatch.setattr(Timed, "_charge", lambda self, state, ns: charge(self, other.get(state, state), ns))


def lose_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = Accounts.enter

    def forget(self: Accounts, request: Any, row: int, start: int) -> None:
        enter(self, request, row, start)
        self._live[request].row = (row + 1) % 8

    monkeypatch.setattr(Accounts, "enter", forget)


def charge_only_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed request keeps what its row before was charged in that row."""
    monkeypatch.setattr(Accounts, "settle", lambda self, account: None)


@pytest.mark.parametrize(
    "mutate", [drop_a_transition, count_a_step_twice, swap_two_states, lose_a_share, charge_only_at_the_end]
)
def test_a_broken_account_is_noticed(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: Any) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        harness = outcomes(overlap=False, num_requests=20)
        check_steps(harness)
        check_tokens(harness)
