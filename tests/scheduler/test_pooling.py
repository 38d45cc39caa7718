"""Requests that end with their prompt: each position is pooled once, whatever chunks and preemptions did."""

from __future__ import annotations

from statistics import mean

import pytest

from steelyard.core.request import FinishReason, Request
from steelyard.core.step import Want
from steelyard.errors import ContextLengthExceeded
from tests.scheduler.scheduler_rig import Rig, make_request


def pooled(name: str, prompt: list[int], kind: Want) -> Request:
    made = make_request(name, prompt, None)
    made.pooling = kind
    return made


def wanted(request: Request) -> list[float]:
    """(token, position) of the last position, or the means of all."""
    tokens = request.tokens
    if request.pooling is Want.POOL_MEAN:
        return [mean(tokens), (len(tokens) - 1) / 2]
    return [tokens[-1], len(tokens) - 1]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(("budget", "num_blocks"), [(256, 64), (16, 64), (4, 12)])
@pytest.mark.parametrize("kind", [Want.POOL_LAST, Want.POOL_MEAN], ids=["last", "mean"])
def test_every_position_counts_once(overlap: bool, budget: int, num_blocks: int, kind: Want) -> None:
    tight = num_blocks == 12
    rig = Rig(budget=budget, num_blocks=num_blocks, overlap=overlap, max_num_seqs=4, caching=not tight)
    simulation = rig.simulation()
    for i in range(2):
        simulation.add(make_request(f"text{i}", [*range(20 + 4 * i)], 60))
    requests = [pooled(f"r{i}", [(17 * i + 3 * j) % 1000 for j in range(70 + 5 * i)], kind) for i in range(4)]
    for request in requests:
        simulation.add(request)
    simulation.run()
    for request in requests:
        assert request.vector() == pytest.approx(wanted(request))
        assert request.reason is FinishReason.STOP
        assert simulation.outputs[request.key] == []
    simulation.scheduler.check()
    assert simulation.scheduler.cache.usage().active == 0
    assert (sum(request.num_preemptions for request in requests) > 0) == tight


def test_a_prompt_as_long_as_the_context_fits_and_one_more_token_does_not() -> None:
    simulation = Rig(max_model_len=64, budget=16).simulation()
    whole = pooled("whole", [5] * 64, Want.POOL_MEAN)
    simulation.add(whole)
    with pytest.raises(ContextLengthExceeded, match="65 tokens"):
        simulation.add(pooled("more", [5] * 65, Want.POOL_MEAN))
    simulation.run()
    assert whole.vector() == [5, 31.5]
