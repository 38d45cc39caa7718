"""The time to the first token tells a tenant what it has cached itself, and nothing of what another tenant has.

The engine is real, with its cache and scheduler; its steps take virtual time by their tokens, with noise and with a
load of others, so that a time is what a client would measure. One pair: a prompt somebody has sent, and a fresh one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from steelyard.cache.manager import CacheManager
from steelyard.core.hashing import chain, root_hash
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import StepPlan
from steelyard.engine.engine import Engine, EngineOptions
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.server.public import PublicPrefixes
from steelyard.server.tenants import Tenant, Tenants
from steelyard.sim.scripted import Script, ScriptedRunner
from steelyard.wire.messages import Accepted, Deltas, Submit
from tests.server.real_engine import CAPS

NUM_PAIRS = 200
PROMPT_LEN = 96


class Bench:
    """An engine on a clock of its own, and two tenants with keys."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 1
        runner = ScriptedRunner(CAPS, Script(2, (40,) * 50), delay=self._take_time, clock=lambda: self.now_ns)
        cache = CacheManager(CAPS, True)
        options = EngineOptions("tiny", frozenset({2}))
        scheduler = Scheduler(CAPS, cache, SchedulerOptions())
        self.engine = Engine(runner, cache, scheduler, options, clock_ns=lambda: self.now_ns)
        self.tenants = Tenants([Tenant(name, (name.encode() * 32,)) for name in "abc"], b"k" * 32)
        self.public: PublicPrefixes | None = None
        self._ids = map(str, itertools.count())

    def _take_time(self, plan: StepPlan) -> None:
        num_tokens = sum(work.num_new for work in plan.work)
        self.now_ns += int((1_000_000 + 20_000 * num_tokens) * self.rng.uniform(0.9, 1.1))

    def submit(self, tenant: str, prompt: list[int], max_tokens: int = 1) -> str:
        namespace = self.tenants.namespace(self.tenants.all[tenant])
        if self.public is not None:
            hashes = self.public.keys(prompt, namespace)
        else:
            hashes = chain(root_hash(CAPS.fingerprint, CAPS.kv_layout, namespace), prompt, CAPS.block_size)
        id = next(self._ids)
        answer = self.engine.submit(
            Submit(id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), namespace, tenant, 0, hashes)
        )
        assert isinstance(answer, Accepted)
        return id

    def first_token_ns(self, tenant: str, prompt: list[int]) -> tuple[int, int]:
        """(virtual time, steps) from a request to its first token, beside a load that others make."""
        if self.rng.random() < 0.5:
            self.submit("c", self.fresh(self.rng.randrange(1, 64)), self.rng.randrange(1, 8))
        id, began_ns, steps = self.submit(tenant, prompt), self.now_ns, 0
        first_ns = 0
        while self.engine.has_work:
            messages = self.engine.step()
            steps += not first_ns
            if not first_ns and any(d.id == id for m in messages if isinstance(m, Deltas) for d in m.items):
                first_ns = self.now_ns
        assert first_ns
        return first_ns - began_ns, steps

    def fresh(self, length: int) -> list[int]:
        return [self.rng.randrange(3, 300) for _ in range(length)]


def auc(known: Sequence[float], fresh: Sequence[float]) -> float:
    """How well "shorter means known" tells the two apart: 1 always, 0.5 not at all (Mann and Whitney's U over n m)."""
    wins = sum((k < f) + 0.5 * (k == f) for k in known for f in fresh)
    return wins / (len(known) * len(fresh))


def half_width(num_pairs: int) -> float:
    """Of the 95 % interval around 0.5 where there is nothing to tell: the U statistic's own variance."""
    return 1.96 * math.sqrt((2 * num_pairs + 1) / (12 * num_pairs * num_pairs))


def measured(seed: int, victim: str, observer: str) -> tuple[list[int], list[int]]:
    """The observer's times for prompts the victim has sent just before, and for fresh ones."""
    bench = Bench(seed)
    known: list[int] = []
    fresh: list[int] = []
    for _ in range(NUM_PAIRS):
        secret, other = bench.fresh(PROMPT_LEN), bench.fresh(PROMPT_LEN)
        bench.first_token_ns(victim, secret)
        probes = [(known, secret), (fresh, other)]
        bench.rng.shuffle(probes)
        for times, prompt in probes:
            times.append(bench.first_token_ns(observer, prompt)[0])
    return known, fresh


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_first_tokens_time_tells_nothing_across_tenants_and_everything_within_one(seed: int) -> None:
    across = auc(*measured(seed, "a", "b"))
    within = auc(*measured(seed, "a", "a"))
    print(f"AUC over {NUM_PAIRS} pairs: across tenants {across:.3f}, within one {within:.3f}")
    assert abs(across - 0.5) <= half_width(NUM_PAIRS)
    assert within >= 0.95


def test_another_tenants_hit_changes_no_step(seed: int = 3) -> None:
    """Exact, without a load: the same steps for a prompt another has sent as for one nobody has."""
    bench = Bench(seed)
    bench.rng.random = lambda: 1.0  # type: ignore[method-assign]
    for _ in range(20):
        secret, other = bench.fresh(PROMPT_LEN), bench.fresh(PROMPT_LEN)
        mine = bench.first_token_ns("a", secret)[1]
        assert bench.first_token_ns("b", secret)[1] == bench.first_token_ns("b", other)[1] == mine
        assert bench.first_token_ns("a", secret)[1] < mine
