"""The scheduler's view of cost agrees with the model behind it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.plan.calibration import generic
from steelyard.plan.costs import Chunk, decode
from steelyard.plan.predict import PredictedCost
from steelyard.scheduler.protocols import Cost
from tests.plan.setups import make_roofline

ROOF = make_roofline()
PREDICTED = PredictedCost(ROOF, generic(ROOF))
COST: Cost = PREDICTED


def test_a_decode_step_is_the_models_estimate() -> None:
    assert COST.step_ns(32, 32, 32 * 1024) == generic(ROOF).estimate(ROOF, decode(32, 1024)).ns


def test_tokens_beyond_one_a_row_are_one_rows_prompt() -> None:
    both = (Chunk(512, 1024), Chunk(1, 1024, 31))
    assert COST.step_ns(543, 32, 32 * 1024) == generic(ROOF).estimate(ROOF, both).ns


@given(st.integers(1, 256), st.integers(0, 4096), st.integers(1, 4096), st.integers(1, 512))
@settings(max_examples=60)
def test_more_tokens_never_take_less(rows: int, prompt: int, each: int, more: int) -> None:
    context = rows * each
    assert COST.step_ns(rows + prompt, rows, context) <= COST.step_ns(rows + prompt + more, rows, context)


def test_swapping_4k_tokens_is_quicker_than_computing_them() -> None:
    assert 10.0e6 < COST.swap_ns(4096) < 10.6e6 < 60e6 < COST.recompute_ns(4096) < 130e6
    assert COST.step_ns(0, 0, 0) == 0
