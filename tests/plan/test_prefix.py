"""What cached KV is worth, against published break-evens and by its own consistency."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from steelyard.errors import StartError
from steelyard.plan.calibration import generic
from steelyard.plan.costs import Chunk, decode, prefill
from steelyard.plan.device import find_device
from steelyard.plan.prefix import Economics, History, break_even_hit_share
from steelyard.plan.workload import Slo, Workload
from tests.plan.setups import exact, make_roofline, make_service

ROOF = make_roofline()
CACHE = Economics(ROOF, generic(ROOF))


@pytest.mark.parametrize(("prefix", "published"), [(8192, 5.86e9), (32768, 4.01e9)])
def test_loading_beats_computing_from_the_published_bandwidth_on(prefix: int, published: float) -> None:
    """LLaMA-3-70B on 8 x A800 at full rate (Mooncake, FAST '25, section 2): bytes / (FLOPs / rate)."""
    peak = 8 * 312e12
    d, gqa, size = 8192, 8, 2
    formula = 2 * d * size / (gqa * (4 * prefix * d + 22 * d * d)) * peak
    assert formula == pytest.approx(published, rel=2e-3)
    device = replace(find_device("A100-80"), bf16_flops=peak, bandwidth=8 * 2039e9)
    roof = make_roofline("llama-3-70b", device)
    flops = sum(part.flops for part in roof.costs.parts(prefill(prefix)).values())
    computing_s = flops / peak + roof.costs.passed_bytes(prefix, 0) / (8 * 2039e9)
    ours = Economics(roof, exact(roof)).restore(prefix).break_even_bandwidth
    assert ours == pytest.approx(formula, rel=0.15)
    assert ours == pytest.approx(327_680 * prefix / computing_s, rel=0.01)


def test_swap_beats_recompute_on_an_h200() -> None:
    """4k tokens of an 8B model: 512 MiB, 10.2 ms each way as measured (h200-swap.json), some 90 ms to compute again."""
    back = CACHE.restore(4096, network_bandwidth=100e9)
    assert back.bytes == 4096 * 131_072
    assert back.swap_s == pytest.approx(0.01022, rel=0.02)
    assert 0.07 < back.recompute_s < 0.13
    assert back.best == "transfer"
    assert CACHE.restore(4096).best == "swap"
    assert back.swap_s < back.recompute_s < back.bytes / (back.break_even_bandwidth * 0.99)


def test_a_slow_link_makes_computing_again_the_best() -> None:
    slow = replace(find_device("H200"), host_bandwidth=1e9)
    roof = make_roofline(device=slow)
    back = Economics(roof, generic(roof)).restore(4096)
    assert back.best == "recompute"
    assert back.break_even_bandwidth > slow.host_bandwidth


CASE = History(context_len=60_000, removed_len=40_000, tail_len=10_000, summary_len=1_000, turns=50)


def test_deleting_history_breaks_the_cached_prefix_and_must_earn_that_back() -> None:
    found = CACHE.compaction(CASE)
    redo = CACHE.calibration.estimate(ROOF, (Chunk(11_000, 21_000),)).seconds
    row = CACHE.calibration.estimate(ROOF, decode(32, 60_000)).seconds / 32
    assert found.once_s == pytest.approx(redo + 1_000 * row)  # the tail and the summary again, the summary written
    assert found.saved_per_turn_s > 0
    assert found.break_even_turns == pytest.approx(found.once_s / found.saved_per_turn_s)
    assert found.freed_bytes == 39_000 * 131_072
    last = math.floor(found.break_even_turns)
    assert not CACHE.compaction(replace(CASE, turns=last)).worth_it
    assert CACHE.compaction(replace(CASE, turns=last + 1)).worth_it


def test_without_a_prefix_cache_deleting_pays_at_once_nearly() -> None:
    cached, cold = CACHE.compaction(CASE), CACHE.compaction(replace(CASE, hit_rate=0.0))
    assert cold.break_even_turns < 1 < cached.break_even_turns


def test_deleting_from_the_end_has_nothing_to_compute_again() -> None:
    found = CACHE.compaction(replace(CASE, tail_len=0, summary_len=0))
    assert found.once_s == 0.0
    assert found.break_even_turns == 0.0


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"removed_len": 55_000}, "remove"), ({"summary_len": 40_000}, "summary"), ({"hit_rate": 1.5}, "hit_rate")],
)
def test_lengths_that_do_not_fit_are_refused(changed: dict[str, float], field: str) -> None:
    with pytest.raises(StartError) as caught:
        CACHE.compaction(replace(CASE, **changed))  # type: ignore[arg-type]
    assert caught.value.param == field


def test_a_cache_pays_from_some_hit_share_on() -> None:
    tight = make_service(kv_gib=12.0)
    load = Workload.of(1.0, 2048, 512)
    shares = [break_even_hit_share(tight, load, Slo(), part) for part in (0.0, 0.1, 0.3)]
    assert shares[0] == 0.0
    assert shares[1] is not None and shares[2] is not None
    assert 0.0 < shares[1] < shares[2]
