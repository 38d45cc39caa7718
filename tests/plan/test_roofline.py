"""Golden step times to three digits, what bounds a step, and the three kinds of time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import StartError
from steelyard.plan.costs import Chunk, CostModel, Setup, attention_traffic, decode, prefill
from steelyard.plan.device import Ceilings, Device, find_device
from steelyard.plan.formats import weight_format
from steelyard.plan.parts import AttentionShape
from steelyard.plan.presets import preset_config
from steelyard.plan.roofline import Roofline, smooth_max
from steelyard.plan.shape import ModelShape
from steelyard.plan.times import Estimate, Floor, Reach

DECODES = ((1, 384), (32, 384), (128, 384), (256, 384), (32, 4160), (128, 4160))
GOLDEN = {  # decode ms at DECODES, prefill of 4096 with logits of all tokens
    ("h200", "llama-3.1-8b"): ((3.138, 3.463, 4.469, 5.811, 6.762, 17.667), 66.6),
    ("h200", "qwen2.5-7b"): ((2.951, 3.093, 3.533, 4.120, 4.536, 9.307), 61.9),
    ("h200", "llama-2-7b"): ((2.795, 4.095, 8.122, 13.49, 17.293, 60.914), 59.2),
    ("h100", "llama-3.1-8b"): ((4.496, 4.961, 6.404, 8.327, 9.689, 25.314), 66.6),
    ("l4", "llama-3.1-8b"): ((50.2, 55.4, 71.5, 93.0, 108.2, 282.7), 1088.9),
}
CEILINGS = Ceilings(700e12, 530e12, 3.4e12, 4.1e12, 4.26e12)


def roofline(device: str | Device, model: str, fmt: str = "bfloat16", tp: int = 1) -> Roofline:
    shape = ModelShape.from_config(preset_config(model))
    where = find_device(device) if isinstance(device, str) else device
    return Roofline(Setup(shape, where, weight_format(fmt), 2, tp))


@pytest.mark.parametrize(("device", "model"), GOLDEN)
def test_golden_step_times_at_efficiency_one(device: str, model: str) -> None:
    decodes, whole_prefill = GOLDEN[device, model]
    roof = roofline(device, model)
    for (batch, context), expected in zip(DECODES, decodes):
        assert _as_printed(roof.step(decode(batch, context)).overlapped_s * 1e3, expected) == expected
    step = roof.step(prefill(4096, all_logits=True))
    assert _as_printed(step.overlapped_s * 1e3, whole_prefill) == whole_prefill


def _as_printed(value: float, like: float) -> float:
    """`value` rounded to as many decimals as the printed one has."""
    return round(value, len(str(like).split(".")[1]))


def test_the_floor_adds_parts_and_is_never_under_the_overlapped_time() -> None:
    roof = roofline("h200", "llama-3.1-8b")
    memory_bound = roof.step(decode(128, 384))
    assert memory_bound.seconds == pytest.approx(memory_bound.overlapped_s)
    mixed = roof.step(decode(256, 384))  # products are bound by arithmetic there, attention by memory
    assert mixed.seconds > 1.1 * mixed.overlapped_s
    assert {p.name: p.bound for p in mixed.parts}["weights"] == "compute"
    assert {p.name: p.bound for p in mixed.parts}["attention_decode"] == "memory"


def test_a_prefill_of_256_is_just_bound_by_arithmetic_on_an_h200() -> None:
    step = roofline("h200", "llama-3.1-8b").step(prefill(256, all_logits=True))
    compute, memory = sum(p.compute_s for p in step.parts), sum(p.memory_s for p in step.parts)
    assert round(compute * 1e3, 2) == 3.90
    assert round(memory * 1e3, 2) == pytest.approx(3.13, abs=0.011)
    assert step.bound == "compute"


def test_logits_of_the_last_token_only_are_the_floor_of_a_prefill() -> None:
    roof = roofline("h200", "llama-3.1-8b")
    last, every = roof.floor(prefill(4096)), roof.floor(prefill(4096, all_logits=True))
    head = 128256 * 4096
    read_once, computed = 2 * head / 4.8e12, 2 * head * 4096 / 989.4e12
    assert every.ms - last.ms == pytest.approx((computed - read_once) * 1e3)


def test_scaling_book_llama_2_13b_on_eight_v5e() -> None:
    """8k context; milliseconds a step at batch 1, 8, 16, 32, 64, 240, all eight chips as one device."""
    one = find_device("tpu-v5e")
    slice_ = replace(one, bandwidth=8 * one.bandwidth, bf16_flops=8 * one.bf16_flops)
    roof = roofline(slice_, "llama-2-13b")
    table = {1: 4.98, 8: 12.13, 16: 20.30, 32: 36.65, 64: 69.33, 240: 249.09}
    for batch, expected in table.items():
        assert roof.step(decode(batch, 8192)).seconds * 1e3 == pytest.approx(expected, rel=0.013)


def test_distserve_coefficients_are_the_efficiencies_they_imply() -> None:
    """OPT-13B on an A100: 0.1019 ms a prompt token is 0.81 of peak, 6.27e-4 ms a context token 0.64 of bandwidth."""
    roof = roofline("a100-80", "opt-13b")
    parts = roof.costs.parts(decode(1, 1000))
    per_token = (parts["weights"].flops + parts["head"].flops) / 312e12
    assert per_token / 0.1019e-3 == pytest.approx(0.81, abs=0.01)
    kv_s = parts["attention_decode"].bytes / 1000 / 2039e9
    assert kv_s / 6.27e-7 == pytest.approx(0.64, abs=0.01)


@pytest.mark.parametrize("device", ["h200", "h100", "a100-80"])
def test_critical_batch_is_the_ridge_for_sixteen_bits_and_half_for_eight(device: str) -> None:
    found = find_device(device)
    expected = {"h200": 206, "h100": 295, "a100-80": 153}[device]
    assert round(found.critical_batch()) == expected == round(found.ridge())
    assert found.critical_batch(1.0) == found.critical_batch() / 2


def test_windows_limit_attention_and_the_bytes_it_reads() -> None:
    costs = CostModel(
        Setup(ModelShape.from_config(preset_config("gemma-3-4b")), find_device("h200"), weight_format("bf16"))
    )
    near, far = (costs.parts(decode(1, n))["attention_decode"] for n in (1024, 32768))
    assert near.bytes == 1024 * 139_264
    assert far.bytes == costs.kv_bytes(32768) == 29 * 4096 * 1024 + 5 * 4096 * 32768
    assert far.flops / far.bytes == pytest.approx(near.flops / near.bytes)


@given(st.integers(1, 60), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 80)))
def test_causal_pairs_equal_a_count_one_by_one(num_new: int, before: int, window: int | None) -> None:
    context = before + num_new
    attention = AttentionShape(1, 1, 1, 1, window)
    counted = sum(min(p + 1, window or p + 1) for p in range(before, context))
    assert attention.causal_pairs(num_new, context) == counted


def test_experts_touched_grow_from_active_to_all() -> None:
    costs = CostModel(
        Setup(ModelShape.from_config(preset_config("qwen3-30b-a3b")), find_device("h200"), weight_format("bf16"))
    )
    one, many = (costs.parts(decode(b, 100))["experts"] for b in (1, 4096))
    assert many.bytes == pytest.approx(16 * one.bytes)  # 128 of 128 against 8
    assert costs.parts(decode(32, 100), "fewest")["experts"].bytes == pytest.approx(one.bytes)
    touched = costs.parts(decode(32, 100))["experts"].bytes / one.bytes * 8
    assert touched == pytest.approx(128 * (1 - (1 - 8 / 128) ** 32))
    assert costs.parts(decode(32, 100))["experts"].flops == 32 * one.flops


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_divides_work_and_adds_links(tp: int) -> None:
    one, many = roofline("h200", "llama-3.1-8b"), roofline("h200", "llama-3.1-8b", tp=tp)
    a, b = one.costs.parts(decode(64, 2048)), many.costs.parts(decode(64, 2048))
    for name in ("weights", "attention_decode", "head"):
        assert b[name].flops * tp == pytest.approx(a[name].flops)
        assert b[name].bytes * tp == pytest.approx(a[name].bytes, rel=1e-3)
    assert "links" not in a
    assert b["links"].link_bytes == 2 * 32 * (64 * 4096 * 2) * 2 * (tp - 1) / tp


def test_a_latent_is_read_whole_by_every_rank() -> None:
    one, eight = roofline("h200", "deepseek-v3", "fp8"), roofline("h200", "deepseek-v3", "fp8", tp=8)
    a, b = (r.costs.parts(decode(8, 4096))["attention_decode"] for r in (one, eight))
    assert a.bytes == b.bytes == 8 * 4096 * 70_272
    assert b.flops * 8 == a.flops


def test_fp8_weights_halve_the_bytes_and_double_the_peak() -> None:
    half, whole = roofline("h200", "llama-3.1-8b", "fp8"), roofline("h200", "llama-3.1-8b")
    assert half.step(decode(1, 1)).parts[0].memory_s == pytest.approx(
        whole.step(decode(1, 1)).parts[0].memory_s / 2, rel=1e-3
    )
    ratio = whole.step(prefill(8192)).parts[0].compute_s / half.step(prefill(8192)).parts[0].compute_s
    assert ratio == pytest.approx(1978.9 / 989.4)
    without = roofline("a100-80", "llama-3.1-8b", "fp8").step(prefill(8192)).parts[0].compute_s
    assert without == roofline("a100-80", "llama-3.1-8b").step(prefill(8192)).parts[0].compute_s


def test_a_published_time_per_token_under_the_floor_is_rejected() -> None:
    """3.47 ms a token for Llama-3.1-8B on an H100 was once published; weights alone take 4.48 ms there."""
    roof = roofline("h100", "llama-3.1-8b")
    floor = roof.floor(decode(1, 235), routing="fewest")
    assert floor.ms > 4.48
    assert floor.is_broken_by(3.47e-3)
    assert not floor.is_broken_by(7.2e-3)


def test_utilisation_is_one_at_the_floor_of_a_memory_bound_step() -> None:
    roof = roofline("h200", "llama-3.1-8b")
    step = decode(8, 512)
    assert roof.mbu(step, roof.floor(step).seconds) == pytest.approx(1.0)
    assert roof.mfu(step, roof.floor(step).seconds) == pytest.approx(roof.step(step).intensity / 206.1, rel=1e-3)
    full = prefill(8192, all_logits=True)
    assert roof.mfu(full, roof.floor(full).seconds) == pytest.approx(1.0)


def test_reach_uses_measured_ceilings_and_is_above_the_floor() -> None:
    with pytest.raises(StartError, match="--measure"):
        roofline("h200", "llama-3.1-8b").reach(decode(1, 1))
    roof = roofline(find_device("h200").with_ceilings(CEILINGS), "llama-3.1-8b")
    for step in (decode(1, 128), decode(256, 1024), prefill(4096)):
        assert roof.reach(step).seconds > roof.floor(step).seconds
    assert roof.reach(prefill(4096)).ms == pytest.approx(89.7 + 0.3, rel=0.01)


def test_the_three_kinds_of_time_do_not_mix() -> None:
    kinds = (Floor(1.0), Reach(1.0), Estimate(1.0))
    for a, b in itertools.permutations(kinds, 2):
        assert a != b
        with pytest.raises(TypeError, match="does not mix"):
            _ = a + b  # type: ignore[operator]
        with pytest.raises(TypeError, match="does not mix"):
            _ = a < b  # type: ignore[operator]
    assert Floor(1.0) + Floor(2.0) == Floor(3.0)
    assert isinstance(Floor(1.0) * 2, Floor)


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(1, 16))
def test_smooth_max_lies_between_maximum_and_sum(a: float, b: float, power: float) -> None:
    value = smooth_max(a, b, power)
    assert max(a, b) <= value <= (a + b) * (1 + 1e-9)
    assert smooth_max(a, 0.0, power) == a


models = st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-4b", "deepseek-v2-lite"])


@given(models, st.integers(1, 300), st.integers(1, 20_000), st.integers(0, 50), st.integers(0, 5_000))
def test_more_rows_or_more_context_never_takes_less(
    model: str, batch: int, context: int, rows: int, tokens: int
) -> None:
    roof = _cached(model)
    small, large = roof.floor(decode(batch, context)), roof.floor(decode(batch + rows, context + tokens))
    assert small <= large


@given(models, st.integers(2, 5000), st.integers(1, 5000))
def test_a_prompt_in_two_chunks_does_the_same_arithmetic_and_moves_more(model: str, first: int, second: int) -> None:
    roof = _cached(model)
    whole = roof.costs.parts(prefill(first + second + 1))
    parts = [roof.costs.parts((Chunk(first, first, 1, 0),)), roof.costs.parts((Chunk(second + 1, first + second + 1),))]
    for name in ("weights", "attention_prefill", "head"):
        flops = sum(p[name].flops for p in parts if name in p)
        assert flops == pytest.approx(whole[name].flops)
        assert sum(p[name].bytes for p in parts if name in p) >= whole[name].bytes * (1 - 1e-9)


_made: dict[str, Roofline] = {}


def _cached(model: str) -> Roofline:
    return _made.setdefault(model, roofline("h200", model))


def test_scores_written_out_move_far_more_than_tiles() -> None:
    shape = ModelShape.from_config(preset_config("llama-3.1-8b"))
    naive, tiled = attention_traffic(shape, 4096)
    assert naive > 4 * 2 * 32 * 32 * 4096**2
    assert 10 < naive / tiled < 100
    longer = attention_traffic(shape, 8192)
    assert longer[0] / naive == pytest.approx(4.0, rel=0.05)
