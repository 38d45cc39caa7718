"""The model of a step's time: its terms, what it is made of, and its coefficients where nothing was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.kernels.triton_tiles_linear import MAX_TILE_COLUMNS, MAX_TILE_TOKENS
from steelyard.plan.calibration import FEW_ROWS, KEY_TILE, TERMS, Work, default_calibration, generic
from steelyard.plan.costs import FEW_COLUMNS, Setup, decode, prefill
from steelyard.plan.device import Ceilings
from steelyard.plan.formats import weight_format
from steelyard.plan.roofline import Roofline, smooth_max
from tests.plan.setups import exact, make_roofline
from tests.plan.test_fit import TRUE

ROOF = make_roofline()
EXACT = exact(ROOF)


def test_terms_sum_to_the_estimate_and_are_smooth_at_the_ridge() -> None:
    for step in (decode(1, 10), decode(200, 500), prefill(256), (*decode(64, 900), *prefill(512))):
        estimate = TRUE.estimate(ROOF, step)
        assert sum(TRUE.terms(ROOF, step).values()) == pytest.approx(estimate.seconds)
        assert estimate.seconds > ROOF.floor(step).seconds
    (at_ridge, _), (far, _) = (Work.of(ROOF, s, ROOF.rates).products for s in (prefill(206), prefill(4096)))
    assert smooth_max(*at_ridge) / max(at_ridge) > 1.15
    assert 1.0 <= smooth_max(*far) / max(far) < 1.01


def test_each_coefficient_moves_its_own_term() -> None:
    mixed = (*decode(64, 900), *prefill(512))
    moved = {"step_s": "step", "weights": "weights", "arithmetic": "weights", "kv": "kv", "attention": "attention"}
    before = TRUE.terms(ROOF, mixed)
    for name, term in moved.items():
        after = replace(TRUE, **{name: 2 * getattr(TRUE, name)}).terms(ROOF, mixed)
        assert after[term] > before[term]
        assert {k: v for k, v in after.items() if k != term} == {k: v for k, v in before.items() if k != term}
    assert TRUE.named() == pytest.approx(
        {"step_ms": 0.4, "lone": 0.6, "arithmetic": 1.5, "weights": 1.25, "kv": 1.15, "attention": 1.7}
    )
    assert set(before) == set(TERMS)


def test_one_row_alone_pays_a_share_of_the_fixed_cost() -> None:
    assert TRUE.terms(ROOF, decode(1, 100))["step"] == pytest.approx(0.6 * 4e-4)
    for step in (decode(2, 100), prefill(100), (*decode(1, 100), *prefill(2))):
        assert TRUE.terms(ROOF, step)["step"] == 4e-4


def test_a_few_rows_of_a_small_model_on_a_gpu_pay_half_of_what_one_row_saves() -> None:
    small = make_roofline("qwen3-0.6b", "H200")
    for rows, share in ((1, 0.6), (2, 0.8), (FEW_ROWS, 0.8), (FEW_ROWS + 1, 1.0)):
        assert TRUE.terms(small, decode(rows, 100))["step"] == pytest.approx(share * 4e-4), rows
        assert TRUE.steady.terms(small, decode(rows, 100))["step"] == (4e-4 if rows > 1 else pytest.approx(2.4e-4))
    for step in (prefill(16), (*decode(3, 100), *prefill(2))):
        assert TRUE.terms(small, step)["step"] == 4e-4, "a step with a prompt is padded to more tokens"
    setup = small.setup
    processor = replace(setup.device, bf16_flops=2e12)
    for other in (replace(setup, device=processor), replace(setup, weights=weight_format("float16"))):
        assert TRUE.terms(Roofline(other), decode(2, 100))["step"] == 4e-4


def test_few_rows_are_those_that_the_kernels_take() -> None:
    assert (FEW_ROWS, FEW_COLUMNS) == (MAX_TILE_TOKENS, MAX_TILE_COLUMNS)
    assert make_roofline("qwen3-0.6b").setup.shape.widest == 3072 and ROOF.setup.shape.widest == 14336


def test_keys_are_read_in_whole_tiles() -> None:
    per_token = ROOF.setup.shape.kv_bytes_per_token() / ROOF.rates.kv_bandwidth
    assert EXACT.terms(ROOF, decode(32, 1000))["kv"] == pytest.approx(
        32 * (1000 + KEY_TILE / 2 - 1) * per_token, rel=1e-3
    )


def test_what_kernels_pass_on_is_counted_by_hand() -> None:
    """Llama-3-8B: hidden 4,096, 32 query and 8 KV heads of 128, inner 14,336, 32 layers, vocabulary 128,256."""
    a_token = 2 * 32 * (8 * 4096 + 2 * (32 * 128 + 2 * 8 * 128) + 3 * 14336)
    a_sampled_row = 4 * 4 * 128_256
    assert ROOF.costs.passed_bytes(1, 0) == a_token
    assert ROOF.costs.passed_bytes(100, 7) == 100 * a_token + 7 * a_sampled_row
    assert ROOF.floor(prefill(100)).seconds == pytest.approx(exact(ROOF).terms(ROOF, prefill(100))["weights"], rel=0.2)


def test_ranks_and_experts_divide_what_kernels_pass_on() -> None:
    two = Roofline(replace(ROOF.setup, tp=2))
    hidden = 2 * 32 * 8 * 4096
    assert two.costs.passed_bytes(1, 0) - hidden == (ROOF.costs.passed_bytes(1, 0) - hidden) / 2
    moe = make_roofline("mixtral-8x7b")
    assert moe.costs.passed_bytes(1, 0) == 2 * 32 * (8 * 4096 + 2 * (32 * 128 + 2 * 8 * 128) + 2 * 3 * 14336)


def test_ceilings_are_the_default_where_measured() -> None:
    assert default_calibration(ROOF).source.startswith("generic")
    device = ROOF.setup.device.with_ceilings(Ceilings(7e14, 5.3e14, 3.4e12, 4.1e12, 4.2e12, 3e-4))
    measured = Roofline(Setup(ROOF.setup.shape, device, ROOF.setup.weights))
    found = default_calibration(measured)
    assert found.step_s == 3e-4
    assert found.estimate(measured, decode(1, 384)).ms == pytest.approx(4.41 + 0.012 + 0.3, rel=0.01)


def test_generic_coefficients_are_near_what_vllm_does_on_an_h200() -> None:
    """4.87 to 4.99 ms a token, and 98 to 102 ms for a prompt of 4,096, were measured with vLLM 0.24."""
    calibration = generic(ROOF)
    assert calibration.estimate(ROOF, decode(1, 256)).ms == pytest.approx(4.9, rel=0.15)
    assert calibration.estimate(ROOF, prefill(4096)).ms == pytest.approx(100, rel=0.15)


@given(st.integers(1, 300), st.integers(1, 16_000), st.integers(1, 300), st.integers(1, 16_000))
@settings(max_examples=150)
def test_an_estimate_is_over_the_floor_and_grows_with_rows_and_context(
    rows: int, context: int, more_rows: int, more_context: int
) -> None:
    small, large = decode(rows, context), decode(rows + more_rows, context + more_context)
    for calibration in (EXACT, TRUE, generic(ROOF)):
        low, high = (calibration.estimate(ROOF, step) for step in (small, large))
        assert ROOF.floor(small).seconds <= low.seconds < high.seconds


@given(st.integers(2, 8192), st.integers(1, 8192))
@settings(max_examples=100)
def test_an_estimate_grows_with_the_prompt(tokens: int, more: int) -> None:
    for calibration in (EXACT, TRUE, generic(ROOF)):
        low, high = (calibration.estimate(ROOF, prefill(n)) for n in (tokens, tokens + more))
        assert ROOF.floor(prefill(tokens)).seconds <= low.seconds < high.seconds
