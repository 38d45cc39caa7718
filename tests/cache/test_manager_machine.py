"""Random calls on the block manager against a model that knows what each block's slots hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steelyard.cache.manager import CacheManager
from steelyard.core.request import Request
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import KvGroup, RunnerCaps

BLOCK = 4
Window = int | tuple[int, int] | None
Slots = dict[tuple[int, int, int], tuple[bytes, tuple[int, ...]]]
"""What the slots of a block hold; blocks of the host tier are numbered from -1 down."""


class ManagerMachine(RuleBasedStateMachine):
    """`slots[group, block, offset]` is the whole history (namespace and tokens) of what was written there.

    Whatever a request reads through its table must be its own history, and growth fails only where blocks lack.
    """

    @initialize(
        num_blocks=st.integers(2, 10),
        windows=st.sampled_from([(None,), (5,), (None, 3), (8, None, 4), ((5, 3),), (None, (4, 6))]),
        caching=st.booleans(),
        num_slots=st.sampled_from([0, 1, 3, 8, 30]),
    )
    def build(self, num_blocks: int, windows: tuple[Window, ...], caching: bool, num_slots: int) -> None:
        caps = RunnerCaps(
            block_size=BLOCK,
            num_blocks=(num_blocks,) * len(windows),
            groups=tuple(KvGroup(1, *(w if isinstance(w, tuple) else (w,))) for w in windows),
            max_rows=99,
            max_model_len=200,
            max_batched_tokens=100,
            vocab_size=9,
            overlaps=False,
            fingerprint="m",
            kv_layout="l",
            num_host_blocks=(num_slots,) * len(windows) if num_slots else (),
        )
        self.groups = caps.groups
        self.manager = CacheManager(caps, caching)
        self.slots: Slots = {}
        self.live: list[Request] = []
        self.away: dict[Request, int] = {}
        self.num_made = 0

    def make(self, tokens: list[int], namespace: bytes) -> Request:
        self.num_made += 1
        request = Request(str(self.num_made), tokens, SamplingParams(seed=0), 0, namespace=namespace)
        request.row = self.num_made
        return request

    def move(self) -> None:
        """Make the noted moves, as a plan would before its work."""
        outs: set[tuple[int, int]] = set()
        has_come_in = False
        for swap in self.manager.host.take_swaps():
            source, target = swap.device_block, -swap.host_slot
            if not swap.out:
                source, target, has_come_in = target, source, True
            else:
                assert not has_come_in and (swap.group, target) not in outs
                outs.add((swap.group, target))
            for offset in range(BLOCK):
                self.slots[swap.group, target, offset] = self.slots.get((swap.group, source, offset), (b"", ()))

    def write(self, request: Request, start: int, end: int) -> None:
        self.move()
        assert self.manager.may_write(request, start, end)
        for g, table in enumerate(self.manager.tables(request)):
            for p in range(start, end):
                self.slots[g, table[p // BLOCK], p % BLOCK] = (request.namespace, tuple(request.tokens[: p + 1]))

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        tenant=st.sampled_from([b"", b"x"]),
        from_host=st.booleans(),
    )
    def admit(self, tokens: list[int], tenant: bytes, from_host: bool) -> None:
        request = self.make(tokens, tenant)
        free = self.manager.free_blocks()
        hit = self.manager.match(request, from_host=from_host)
        assert self.manager.match(request) <= self.manager.match(request, from_host=True)
        assert hit % BLOCK == 0 and hit < len(tokens)
        if self.manager.grow(request, len(tokens), hit_tokens=hit) is None:
            assert free < -(-len(tokens) // BLOCK) and not self.manager.tables(request)
            return
        self.write(request, hit, len(tokens))
        request.num_computed = len(tokens)
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        if self.manager.grow(request, len(request.tokens) + 1) is not None:
            request.tokens.append(token)
            self.write(request, len(request.tokens) - 1, len(request.tokens))
            request.num_computed = len(request.tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.manager.commit(request, request.num_computed)
        self.manager.slide(request, request.num_computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), back=st.integers(0, 8), token=st.integers(2, 8))
    def fork(self, data: st.DataObject, back: int, token: int) -> None:
        parent = data.draw(st.sampled_from(self.live))
        at = parent.num_computed - back
        if at < 1 or not self.manager.can_fork(parent, at):
            return
        child = self.make([*parent.tokens[:at], token], parent.namespace)
        copies = self.manager.fork(parent, child, at)
        if copies is None:
            assert at % BLOCK and self.manager.free_blocks() == 0
            return
        self.move()
        for copy in copies:
            for offset in range(BLOCK):
                self.slots[copy.group, copy.dst_block, offset] = self.slots.get(
                    (copy.group, copy.src_block, offset), (b"", ())
                )
        if self.manager.grow(child, at + 1) is None:
            self.manager.release(child)
            return
        self.write(child, at, at + 1)
        child.num_computed = at + 1
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        self.manager.release(request)
        assert self.manager.release(request) == 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.manager.commit(request, request.num_computed)
        self.manager.slide(request, request.num_computed)
        before = [list(table) for table in self.manager.tables(request)]
        if not self.manager.swap_out(request):
            assert [list(table) for table in self.manager.tables(request)] == before
            return
        assert self.manager.swapped_tokens(request) == request.num_computed and not self.manager.tables(request)
        self.live.remove(request)
        self.away[request] = request.num_computed
        request.num_computed = 0

    @precondition(lambda self: self.away)
    @rule(data=st.data(), gives_up=st.booleans())
    def swap_in(self, data: st.DataObject, gives_up: bool) -> None:
        request = data.draw(st.sampled_from(list(self.away)))
        if gives_up:
            self.manager.release(request)
            del self.away[request]
            assert self.manager.swapped_tokens(request) == 0
            return
        free = self.manager.free_blocks()
        if self.manager.grow(request, len(request.tokens)) is None:
            assert free < -(-len(request.tokens) // BLOCK) and self.manager.swapped_tokens(request)
            return
        request.num_computed = self.away.pop(request)
        self.move()
        self.live.append(request)

    @rule(tenant=st.sampled_from([b"", b"x", None]))
    def drop(self, tenant: bytes | None) -> None:
        self.manager.drop(tenant)
        probes = [r for r in self.live if tenant is None or r.namespace == tenant]
        probes += [r for r in self.away if tenant is None or r.namespace == tenant]
        again = [self.make([*r.tokens, 0], r.namespace) for r in probes]
        assert all(self.manager.match(r, from_host=True) == 0 for r in again)

    @invariant()
    def each_request_reads_its_own_history(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        usage = self.manager.usage()
        assert usage.free + usage.active == usage.total and usage.clean + usage.cached == usage.free
        for request in self.live:
            for g, (table, group) in enumerate(zip(self.manager.tables(request), self.groups)):
                first = 0 if group.window is None else max(0, request.num_computed - group.window + 1)
                for p in [*range(min(group.keep_first, first)), *range(first, request.num_computed)]:
                    expected = (request.namespace, tuple(request.tokens[: p + 1]))
                    assert self.slots[g, table[p // BLOCK], p % BLOCK] == expected


class TestManagerMachine(ManagerMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestManagerMachineLong(ManagerMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=80)
