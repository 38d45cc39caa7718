"""What a knob is predicted to buy: against the step model by hand, in the right direction, and silent when unread."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.plan.costs import Chunk, decode
from steelyard.plan.gain import GAP, KNOBS, THROUGHPUT, Running, gain
from tests.plan.setups import exact, make_roofline

ROOF = make_roofline()
EXACT = exact(ROOF)
SEEN = Running(32, 2048, waiting=32, prompt_len=1024, output_len=256, kv_usage=0.5, step_s=0.05)


def seconds(*chunks: Chunk) -> float:
    return EXACT.estimate(ROOF, chunks).seconds


def test_more_rows_are_worth_their_share_of_a_longer_step() -> None:
    found = gain("max_num_seqs", ROOF, EXACT, replace(SEEN, prompt_len=0.0))
    assert found is not None and found.of == THROUGHPUT
    assert found.ratio == pytest.approx(2 * seconds(*decode(32, 2048)) / seconds(*decode(64, 2048)))
    assert "32 rows" in found.formula and "become 64" in found.formula
    assert found.text.startswith(f"{found.ratio:.2f} x output tokens per second: ")


def test_prompts_take_their_share_of_a_mean_step() -> None:
    found = gain("enable_prefix_caching", ROOF, EXACT, SEEN)
    alone = seconds(*decode(32, 2048))
    mixed = seconds(*decode(32, 2048), Chunk(1024, 1024))
    last = seconds(*decode(32, 2048), Chunk(1, 1))
    before, after = (alone + 32 / 256 * (m - alone) for m in (mixed, last))
    assert found is not None and found.ratio == pytest.approx(before / after)
    assert found.ratio > 1.1


def test_more_rows_are_bounded_by_the_pool_and_by_who_waits() -> None:
    full = gain("max_num_seqs", ROOF, EXACT, replace(SEEN, kv_usage=1.0))
    idle = gain("max_num_seqs", ROOF, EXACT, replace(SEEN, waiting=0.0))
    assert full is not None and idle is not None
    assert full.ratio == idle.ratio == 1.0


def test_a_smaller_kv_helps_a_full_pool_more_than_an_empty_one() -> None:
    full = gain("kv_cache_dtype", ROOF, EXACT, replace(SEEN, kv_usage=1.0))
    idle = gain("kv_cache_dtype", ROOF, EXACT, replace(SEEN, waiting=0.0))
    assert full is not None and idle is not None
    assert full.ratio > idle.ratio > 1.0
    small = make_roofline()
    small = type(small)(replace(small.setup, kv_dtype_bytes=1))
    assert gain("kv_cache_dtype", small, EXACT, SEEN) is None


def test_smaller_weights_help_a_small_batch_most() -> None:
    one = gain("dtype", ROOF, EXACT, Running(1, 128))
    many = gain("dtype", ROOF, EXACT, Running(256, 4096))
    assert one is not None and many is not None
    assert 1.8 < one.ratio < 2.0
    assert 1.0 < many.ratio < 1.2


def test_graphs_need_a_measured_step() -> None:
    found = gain("enforce_eager", ROOF, EXACT, SEEN)
    assert found is not None and found.ratio == pytest.approx(0.05 / 0.0068, rel=0.3)
    assert gain("enforce_eager", ROOF, EXACT, replace(SEEN, step_s=None)) is None


def test_a_smaller_budget_shortens_the_gap_only_where_prompts_fill_it() -> None:
    busy = gain("max_num_batched_tokens", ROOF, EXACT, replace(SEEN, waiting=100))
    calm = gain("max_num_batched_tokens", ROOF, EXACT, replace(SEEN, waiting=0))
    assert busy is not None and calm is not None and busy.of == GAP
    assert busy.ratio == pytest.approx(0.5, abs=0.06)
    assert calm.ratio == 1.0
    assert gain("max_num_batched_tokens", ROOF, EXACT, replace(SEEN, prompt_len=0)) is None


@given(
    knob=st.sampled_from(list(KNOBS)),
    rows=st.integers(1, 512),
    context=st.integers(1, 8192),
    waiting=st.integers(0, 512),
    prompt=st.integers(0, 4096),
    usage=st.none() | st.floats(0.01, 1.0),
)
@settings(max_examples=150)
def test_no_knob_is_predicted_to_hurt_by_more_than_rounding(
    knob: str, rows: int, context: int, waiting: int, prompt: int, usage: float | None
) -> None:
    seen = Running(rows, context, waiting, prompt, 128, usage, 0.1)
    found = gain(knob, ROOF, EXACT, seen)
    if found is None:
        assert prompt < 2
    elif found.of == GAP:
        assert 0.0 < found.ratio <= 1.0
    else:
        assert 0.98 <= found.ratio <= (rows + waiting) / rows * 50.0
