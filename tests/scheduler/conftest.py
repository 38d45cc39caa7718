"""Builds small engines without a model; every fixture here is a function that takes sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from steelyard.cache.manager import CacheManager
from steelyard.core.request import Request
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import KvGroup, RunnerCaps
from steelyard.scheduler.options import SchedulerOptions
from steelyard.scheduler.scheduler import Scheduler
from steelyard.sim.clock import VirtualClock
from steelyard.sim.shadow import ShadowRunner
from steelyard.sim.simulation import Simulation


@dataclass(frozen=True)
class Rig:
    """Sizes of a small engine. `windows`: one KV group each; None is full attention."""

    num_blocks: int = 64
    block_size: int = 16
    max_num_seqs: int = 8
    budget: int = 256
    max_model_len: int = 2048
    overlap: bool = False
    caching: bool = True
    windows: tuple[int | None, ...] = (None,)
    vocab_size: int = 1000

    def caps(self) -> RunnerCaps:
        return RunnerCaps(
            block_size=self.block_size,
            num_blocks=(self.num_blocks,) * len(self.windows),
            groups=tuple(KvGroup(1, window) for window in self.windows),
            max_rows=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_batched_tokens=self.budget,
            vocab_size=self.vocab_size,
            overlaps=self.overlap,
            fingerprint="shadow",
            kv_layout=f"shadow/{self.block_size}",
        )

    def simulation(self, **injected: object) -> Simulation:
        """A scheduler over the shadow runner. A request's tenant secret is the high half of its seed."""
        caps, clock = self.caps(), VirtualClock()
        cache = CacheManager(caps, self.caching)
        runner_args = {k: injected.pop(k) for k in ("fail", "secret_of") if k in injected}
        scheduler = Scheduler(caps, cache, SchedulerOptions(overlap=self.overlap), **injected)  # type: ignore[arg-type]
        runner = ShadowRunner(caps, **{"secret_of": tenant_secret, **runner_args}, clock=clock)  # type: ignore[arg-type]
        return Simulation(scheduler, runner, clock)


def tenant_secret(enter: object) -> int:
    return (enter.sampling.seed or 0) >> 32  # type: ignore[attr-defined]


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int | None = 8,
    *,
    index: int = 0,
    seed: int = 0,
    now_ns: int = 0,
    tenant: int = 0,
    **extra: object,
) -> Request:
    sampling_fields = SamplingParams.__dataclass_fields__
    sampling = {k: extra.pop(k) for k in list(extra) if k in sampling_fields}
    params = SamplingParams(max_tokens=max_tokens, seed=(tenant << 32) + seed + index, **sampling)  # type: ignore[arg-type]
    return Request(
        name, prompt, params, now_ns, index=index, namespace=tenant.to_bytes(4, "little") if tenant else b"", **extra
    )  # type: ignore[arg-type]


def solo_output(request: Request, rig: Rig) -> list[int]:
    """What the same request gives alone, on a fresh engine with room for all, caching and overlap off."""
    alone = Rig(
        num_blocks=512, block_size=rig.block_size, caching=False, windows=rig.windows, vocab_size=rig.vocab_size
    )
    simulation = alone.simulation()
    again = Request(
        request.id,
        request.tokens[: request.prompt_len],
        request.sampling,
        0,
        stop_ids=request.stop_ids,
        namespace=request.namespace,
    )
    again.index = request.index
    simulation.add(again)
    simulation.run()
    return simulation.outputs[again.key]


@pytest.fixture
def rig() -> Callable[..., Rig]:
    return Rig
