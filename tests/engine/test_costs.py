"""--swap-space from the flag to the books: what swaps are said to cost, and an engine that swaps where blocks lack."""

from __future__ import annotations

from heapq import heappush
from pathlib import Path
from typing import Any

import pytest

from steelyard.config import EngineConfig
from steelyard.core.request import Request
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import KvGroup, RunnerCaps
from steelyard.core.timed import State
from steelyard.engine.build import build_engine
from steelyard.engine.costs import EngineCost
from steelyard.engine.engine import Engine
from steelyard.errors import StartError
from steelyard.ledger.book import StepBook
from steelyard.wire.messages import Accepted, Ask, Deltas, Submit
from tests import tiny_model
from tests.engine.engine_harness import Harness


def caps(**changes: Any) -> RunnerCaps:
    fields: dict[str, Any] = {
        "block_size": 16, "num_blocks": (100, 100), "groups": (KvGroup(2), KvGroup(3, 40)), "max_rows": 4,
        "max_model_len": 999, "max_batched_tokens": 64, "vocab_size": 9, "overlaps": False, "fingerprint": "f",
        "kv_layout": "l", "num_host_blocks": (9, 9), "host_bandwidth": 2e9,
    }  # fmt: skip
    return RunnerCaps(**(fields | changes))


def test_a_swap_costs_its_blocks_bytes_over_the_measured_rate_and_a_window_bounds_them() -> None:
    cost = EngineCost(caps(), (1000, 10), StepBook(4, 0))
    assert cost.swap_ns(16) == 505 and cost.swap_ns(17) == 1010
    assert cost.swap_ns(160) == 5000 + 4 * 5
    without = EngineCost(caps(host_bandwidth=0.0), (1000, 10), StepBook(4, 0))
    assert without.swap_ns(160) == without.recompute_ns(160), "never cheaper where there is no host tier"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"swap_space": -1.0}, "at least 0"),
        ({"swap_space": 1.0, "kv_cache": "off"}, "--kv-cache on"),
        ({"swap_space": 1.0, "kv_allocation": "contiguous"}, "paged"),
    ],
)
def test_a_swap_space_that_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(StartError, match=says):
        EngineConfig(**fields)


def run(engine: Engine, num_requests: int) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = {}
    for i in range(num_requests):
        sampling = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
        assert isinstance(engine.submit(Submit(f"r{i}", list(range(40 + i, 80 + i)), sampling)), Accepted)
    while engine.has_work:
        for message in engine.step():
            if isinstance(message, Deltas):
                for item in message.items:
                    ids.setdefault(item.id, []).extend(item.ids)
    return ids


def test_an_engine_with_swap_space_swaps_and_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCost, "swap_ns", lambda self, num_tokens: -1)  # cheaper than any step that is measured
    folder = tiny_model.write(tmp_path / "tiny")
    options: dict[str, Any] = {"model": str(folder), "device": "cpu", "dtype": "float32", "check_invariants": True}
    options |= {"max_num_batched_tokens": 64, "max_model_len": 256}
    calm = run(build_engine(EngineConfig(**options)), 4)
    engine = build_engine(EngineConfig(**options, num_gpu_blocks_override=20, swap_space=0.01))
    assert engine.runner.caps.num_host_blocks[0] > 20 and engine.runner.caps.host_bandwidth > 0
    assert run(engine, 4) == calm and not engine.broken
    counters, host = engine.scheduler.counters, engine.cache.host.usage()
    assert counters.swaps_in == counters.swaps_out > 0
    status = engine.status()
    assert status.gauges["host_blocks_total"] == host.total and status.gauges["host_blocks_swapped"] == 0
    assert status.counters["host_blocks_out"] > 0 and status.counters["swaps_in"] == counters.swaps_in
    [pool] = engine.ask(Ask("q", "memory")).value["host_pools"]
    assert pool["clean"] + pool["cached"] + pool["swapped"] == pool["total"] == host.total
    states = engine.ask(Ask("q", "little")).value["states"]
    assert states["swapped"]["requests_ns"] > 0 and states["swap_in"]["requests_ns"] > 0
    assert not any(state["difference_ns"] for state in states.values())


@pytest.mark.parametrize("reason", ["disconnect", "abort", "stop_string", "deadline"])
def test_a_swapped_request_that_ends_frees_both_tiers(reason: str) -> None:
    harness = Harness(overlap=True, num_blocks=(14,), num_host_blocks=(64,))
    for i in range(4):
        harness.submit(f"r{i}", [i + 1] * (9 + 3 * i), max_tokens=24)
    swapped: Request | None = None
    while swapped is None:
        harness.step()
        away = (r for r in harness.engine.live_requests() if r.state in (State.SWAP_OUT, State.SWAPPED))
        swapped = next(away, None)
    before = harness.cache.host.usage().swapped
    if reason == "deadline":
        heappush(harness.engine._deadlines, (harness.clock.now_ns, *swapped.key, False))
        harness.step()
    else:
        harness.stop(swapped.id, swapped.index, reason, keep=1 if reason == "stop_string" else -1)
    assert swapped.state is State.ENDED and swapped.key in harness.ends
    assert before > 0 and not harness.cache.swapped_tokens(swapped)
    harness.run()
    harness.assert_clean()
    assert harness.cache.host.usage().swapped == 0
    ledger = harness.ends[swapped.key].ledger
    assert ledger["swap_out"] > 0 and sum(ledger.values()) == swapped.total_ns
