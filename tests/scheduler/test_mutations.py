"""Bugs put in on purpose: each must be caught by the invariants or by the shadow KV. A net with holes is no net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from steelyard.cache.blocks import BlockPool
from steelyard.cache.host import HostTier
from steelyard.cache.manager import CacheManager
from steelyard.core.request import Request
from steelyard.core.step import Copy, Swap
from steelyard.core.timed import State, Timed
from steelyard.scheduler.live import Live
from steelyard.scheduler.rows import Resident
from tests.scheduler.scheduler_rig import Rig, assert_idle, assert_same_as_solo, make_choices, make_request

RIG = Rig(num_blocks=12, block_size=4, budget=16, overlap=True, vocab_size=40)


def workload(rig: Rig = RIG) -> None:
    """Shared prefixes, forks, two tenants with one prompt, preemption and end-of-text under overlap."""
    simulation = rig.simulation()
    requests = [
        make_request("f", [6] * 13, 4),
        make_request("g", [6] * 13, 4),
        *make_choices("fork", [1, 2, 3, 4, 5, 6], 12, 3, stop_ids=frozenset({7})),
        make_request("a", [9] * 9, 14, stop_ids=frozenset(range(8))),
        make_request("b", [9] * 9, 14, tenant=1),
        make_request("c", [9] * 9, 14, tenant=2),
        make_request("d", [8] * 13, 16),
        make_request("e", [9] * 12, 9, tenant=1),
    ]
    for request in requests:
        simulation.add(request)
    while simulation.scheduler.has_work:
        assert simulation.step()
        simulation.scheduler.check()
        if not simulation.scheduler.has_work and len(requests) < 14:
            again = make_request(f"late {len(requests)}", [9] * 9, 3, tenant=len(requests) % 3)
            simulation.add(again)
            requests.append(again)
    assert_same_as_solo(simulation, requests, rig)
    assert_idle(simulation, requests)
    counters = simulation.scheduler.counters
    assert bool(counters.swaps_in) == bool(rig.num_host_blocks)
    assert counters.preemptions and counters.forks and counters.prefix_hits_tokens and counters.overshoot_tokens


SWAPPING = replace(RIG, num_host_blocks=40)


@pytest.mark.parametrize("rig", [RIG, SWAPPING], ids=["recompute", "swap"])
def test_the_workload_passes_without_a_mutation(rig: Rig) -> None:
    workload(rig)


def skip_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = CacheManager.fork

    def mutated(self: CacheManager, parent: Request, child: Request, at: int) -> list[Copy]:
        fork(self, parent, child, at)
        return []

    monkeypatch.setattr(CacheManager, "fork", mutated)


def share_the_partial_block(monkeypatch: pytest.MonkeyPatch) -> None:
    take = BlockPool.take
    monkeypatch.setattr(BlockPool, "take", lambda self, count: take(self, count) if count != 1 else [1])


def free_before_the_last_step_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Live.end

    def mutated(self: Live, request: Request, reason: Any, now_ns: int) -> Any:
        event = end(self, request, reason, now_ns)
        self.cache.release(request)
        return event

    monkeypatch.setattr(Live, "end", mutated)


def free_a_block_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = CacheManager.commit

    def mutated(self: CacheManager, request: Request, num_tokens: int) -> None:
        commit(self, request, num_tokens)
        if num_tokens > 8:
            self._pools[0].free([self.tables(request)[0][0]])

    monkeypatch.setattr(CacheManager, "commit", mutated)


def drop_transitions_to(dropped: State) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        to = Timed.to

        def mutated(self: Timed, state: State, now_ns: int) -> None:
            if state is not dropped:
                to(self, state, now_ns)

        monkeypatch.setattr(Timed, "to", mutated)

    mutate.__name__ = f"drop_transitions_to_{dropped.value}"
    return mutate


def lose_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutated(self: Timed, now_ns: int, parts: Any) -> None:
        for state, part_ns in parts:
            self._charge(state, part_ns)
        self.since_ns = now_ns

    monkeypatch.setattr(Timed, "split", mutated)


def forget_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.cache.manager.root_hash", lambda fingerprint, layout, namespace: bytes(32))


def publish_before_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = CacheManager.grow

    def mutated(self: CacheManager, request: Request, num_tokens: int, **more: Any) -> Any:
        edits = grow(self, request, num_tokens, **more)
        if edits is not None:
            self.commit(request, min(num_tokens, len(request.tokens)))
        return edits

    monkeypatch.setattr(CacheManager, "grow", mutated)


def preempt_without_giving_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutated(self: Live, resident: Resident) -> None:
        self.rows.leave_row(resident)

    monkeypatch.setattr(Live, "_vacate", mutated)


@pytest.mark.parametrize(
    "mutate",
    [
        skip_the_copy,
        share_the_partial_block,
        free_before_the_last_step_is_committed,
        free_a_block_that_is_in_use,
        drop_transitions_to(State.PREFILL),
        drop_transitions_to(State.DECODE),
        drop_transitions_to(State.RECOMPUTE),
        drop_transitions_to(State.PREEMPTED),
        drop_transitions_to(State.OVERSHOOT),
        drop_transitions_to(State.ENDED),
        lose_time,
        forget_the_namespace,
        publish_before_commit,
        preempt_without_giving_blocks_back,
    ],
)
def test_a_mutation_is_caught(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        workload()


def skip_swaps(out: bool) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        take_swaps = HostTier.take_swaps

        def mutated(self: HostTier) -> tuple[Swap, ...]:
            return tuple(swap for swap in take_swaps(self) if swap.out is not out)

        monkeypatch.setattr(HostTier, "take_swaps", mutated)

    mutate.__name__ = f"skip_swaps_{'out' if out else 'in'}"
    return mutate


def swap_in_before_out(monkeypatch: pytest.MonkeyPatch) -> None:
    take_swaps = HostTier.take_swaps
    monkeypatch.setattr(HostTier, "take_swaps", lambda self: take_swaps(self)[::-1])


def give_a_slot_up_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "hold", lambda self, group, slot: None)


def keep_the_slots_of_who_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "release", lambda self, request: None)


@pytest.mark.parametrize(
    "mutate",
    [
        skip_swaps(out=True),
        skip_swaps(out=False),
        swap_in_before_out,
        give_a_slot_up_before_it_is_read,
        keep_the_slots_of_who_has_ended,
        drop_transitions_to(State.SWAP_OUT),
        drop_transitions_to(State.SWAPPED),
        drop_transitions_to(State.SWAP_IN),
    ],
)
def test_a_mutation_of_swapping_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        workload(SWAPPING)
