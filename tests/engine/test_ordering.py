"""Each policy by its name on a whole engine: weights and targets arrive, and what steps cost is told to the order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.config import SCHEDULING_POLICIES, EngineConfig
from steelyard.core.sampling import SamplingParams
from steelyard.engine.build import build_engine
from steelyard.scheduler.policies.fair import Fair
from steelyard.scheduler.policies.priority import Priority
from steelyard.scheduler.policies.slo import Slo
from steelyard.sim.clock import VirtualClock
from steelyard.wire.messages import Accepted, Finished, Submit
from tests import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_an_engine_serves_under_each_policy_and_tells_it_what_it_needs(
    model: Path, tmp_path: Path, policy: str
) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"eos_token_id": 2, "default": [7] * 20}))
    clock = VirtualClock()
    config = EngineConfig(
        model=str(model), script=str(script), scheduling_policy=policy, max_num_seqs=2, check_invariants=True
    )

    def ticking() -> int:
        return clock.advance(1000)

    engine = build_engine(config, clock_ns=ticking)
    order = engine.scheduler._order
    assert isinstance(order, {"fair": Fair, "slo": Slo, "priority": Priority}.get(policy, object))
    for i in range(6):
        sent = Submit(
            *(str(i), [5 + i] * 40, SamplingParams(max_tokens=8)),
            tenant="ab"[i % 2],
            weight=1.0 + i % 2,
            ttft_slo_in_ns=10**9,
            tpot_slo_ns=10**8,
        )
        assert isinstance(engine.submit(sent), Accepted)
    waiting = next(engine.live_requests())
    assert (waiting.weight, waiting.ttft_slo_ns, waiting.tpot_slo_ns) == (1.0, 10**9, 10**8)
    ends = [m for _ in range(100) for m in engine.step() if isinstance(m, Finished)]
    assert [m.reason for m in ends] == ["length"] * 6
    assert not engine.broken
    if isinstance(order, Fair):
        spent = {t: order.counter(t) * order._weights[t] for t in "ab"}
        assert 0 < sum(spent.values()) <= engine.ledgers.book.totals.requests_ns + 1
        assert spent["a"] == pytest.approx(spent["b"], rel=0.2)
