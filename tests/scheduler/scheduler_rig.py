"""Builds small engines without a model, and the oracle every test compares with: the same request alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from steelyard.cache.manager import CacheManager
from steelyard.core.request import Request
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import KvGroup, RowEnter, RowWork, RunnerCaps, StepPlan
from steelyard.core.timed import State
from steelyard.engine.ledgers import Ledgers
from steelyard.ledger.charges import LearnedCost
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.policies.fair import Fair
from steelyard.scheduler.policies.fcfs import Fcfs
from steelyard.scheduler.policies.priority import Priority
from steelyard.scheduler.policies.slo import Slo
from steelyard.scheduler.protocols import Order
from steelyard.scheduler.scheduler import Scheduler
from steelyard.scheduler.speculation import Speculation
from steelyard.sim.clock import VirtualClock
from steelyard.sim.shadow import ShadowRunner
from steelyard.sim.simulation import Simulation

POLICIES = ("fcfs", "priority", "fair", "slo")


def make_order(policy: str, books: Ledgers, budget: int) -> Order:
    if policy == "slo":
        return Slo(LearnedCost(books.book, budget))
    return {"fcfs": Fcfs, "priority": Priority, "fair": Fair}[policy]()


@dataclass(frozen=True)
class Rig:
    """Sizes of a small engine. `windows`: one KV group each, None is full attention, a pair keeps first positions.

    `num_host_blocks`: of each group.
    """

    num_blocks: int = 64
    block_size: int = 16
    max_num_seqs: int = 8
    budget: int = 256
    max_model_len: int = 2048
    overlap: bool = False
    caching: bool = True
    windows: tuple[int | tuple[int, int] | None, ...] = (None,)
    vocab_size: int = 1000
    num_host_blocks: int = 0
    drafts: int = 0
    draft_load: int = 64
    policy: ClassVar[str] = "fcfs"

    def caps(self) -> RunnerCaps:
        return RunnerCaps(
            block_size=self.block_size,
            num_blocks=(self.num_blocks,) * len(self.windows),
            groups=tuple(KvGroup(1, *(w if isinstance(w, tuple) else (w,))) for w in self.windows),
            max_rows=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_batched_tokens=self.budget,
            vocab_size=self.vocab_size,
            overlaps=self.overlap,
            fingerprint="shadow",
            kv_layout=f"shadow/{self.block_size}",
            num_host_blocks=(self.num_host_blocks,) * len(self.windows) if self.num_host_blocks else (),
            checks_drafts=self.drafts > 0,
        )

    def simulation(
        self,
        *,
        fail: Callable[[StepPlan, RowWork], str | None] = lambda plan, work: None,
        step_ns: Callable[[StepPlan], int] = lambda plan: 1000 * plan.num_tokens,
        policy: str | None = None,
        **injected: Any,
    ) -> Simulation:
        """A scheduler over the shadow runner; `injected` goes to the scheduler."""
        caps, clock = self.caps(), VirtualClock()
        books = Ledgers(caps.max_rows, clock())
        injected.setdefault("order", make_order(policy or self.policy, books, self.budget))
        options = SchedulerOptions(overlap=self.overlap, speculation=Speculation(self.drafts, self.draft_load))
        scheduler = Scheduler(caps, CacheManager(caps, self.caching), options, **injected)
        runner = ShadowRunner(caps, secret_of=tenant_of, fail=fail, clock=clock, step_ns=step_ns)
        return Simulation(scheduler, runner, clock, step_ns=step_ns, books=books)


@dataclass(frozen=True)
class PerToken:
    """A Cost of so many nanoseconds a token."""

    recompute: int = 10
    swap: int = 1

    def step_ns(self, num_tokens: int, num_rows: int, context_tokens: int) -> int:
        return self.recompute * num_tokens

    def recompute_ns(self, num_tokens: int) -> int:
        return self.recompute * num_tokens

    def swap_ns(self, num_tokens: int) -> int:
        return self.swap * num_tokens


def tenant_of(enter: RowEnter) -> int:
    """Requests of these tests carry their tenant in the high half of the seed."""
    return (enter.sampling.seed or 0) >> 32


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int | None = 8,
    *,
    index: int = 0,
    tenant: int = 0,
    now_ns: int = 0,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=(tenant << 32) + index, **(sampling or {}))
    namespace = tenant.to_bytes(4, "little") if tenant else b""
    targets = {k: fields.pop(k) for k in ("ttft_slo_ns", "tpot_slo_ns", "weight") if k in fields}
    request = Request(name, prompt, params, now_ns, index=index, namespace=namespace, tenant=str(tenant), **fields)
    for field, value in targets.items():
        setattr(request, field, value)
    return request


def make_choices(name: str, prompt: list[int], max_tokens: int, n: int, **fields: Any) -> list[Request]:
    """The n choices of one API request; all but the first fork from the first."""
    first = make_request(name, prompt, max_tokens, **fields)
    return [first, *(make_request(name, prompt, max_tokens, index=i, fork_of=first, **fields) for i in range(1, n))]


def solo_output(request: Request, rig: Rig) -> list[int]:
    """What the same request gives alone, on a fresh engine with room for all, caching and overlap off."""
    alone = replace(rig, num_blocks=512, max_num_seqs=1, budget=4096, overlap=False, caching=False, num_host_blocks=0)
    alone = replace(alone, drafts=0)
    again = Request(
        request.id,
        request.tokens[: request.prompt_len],
        request.sampling,
        0,
        index=request.index,
        stop_ids=request.stop_ids,
        namespace=request.namespace,
    )
    simulation = alone.simulation()
    simulation.add(again)
    simulation.run()
    return simulation.outputs[again.key]


def run_checked(simulation: Simulation) -> None:
    """Run to the end with every invariant checked after each step."""
    while simulation.scheduler.has_work:
        assert simulation.step(), "stuck"
        simulation.scheduler.check()


def assert_same_as_solo(simulation: Simulation, requests: list[Request], rig: Rig) -> None:
    for request in requests:
        assert simulation.outputs[request.key] == solo_output(request, rig), f"{request} differs from solo"


def assert_idle(simulation: Simulation, requests: list[Request]) -> None:
    """Nothing runs, waits or holds a block, and every ledger is closed and adds up."""
    scheduler = simulation.scheduler
    scheduler.check()
    usage = scheduler.cache.usage()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.in_flight) == (0, 0, 0)
    assert usage.active == 0 and usage.free == usage.total
    assert scheduler.cache.host.usage().swapped == 0
    for request in requests:
        assert request.state is State.ENDED
        assert sum(request.buckets_ns.values()) == request.since_ns - request.start_ns
