"""The (m, l, a) recurrence equals softmax attention for every blocking, and a test that could miss the classic fault
does not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.kernels.online import Array, Partial, Visible, merge_outputs, online_attention, plain_attention

MASKS = [Visible(), Visible(causal=True), Visible(causal=True, window=5), Visible(window=3)]


def make(num_heads: int, num_kv_heads: int, num_q: int, num_k: int, seed: int = 0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    shapes = [(num_heads, num_q, 8), (num_kv_heads, num_k, 8), (num_kv_heads, num_k, 8)]
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v


def unscaled_merge(state: Partial, block: Partial) -> Partial:
    """The classic fault: the maximum moves on, l and a stay in the old maximum's units."""
    m = np.maximum(state.m, block.m)
    shift = np.where(np.isneginf(m), 0, m)
    fresh = np.exp(block.m - shift)
    return Partial(m, state.l + block.l * fresh, state.a + block.a * fresh[..., None])


def broken_attention(q: Array, k: Array, v: Array, block_size: int) -> Array:
    state = Partial.nothing(q.shape[:2], v.shape[2], q.dtype)
    for j in range(0, k.shape[1], block_size):
        scores = (q @ k[:, j : j + block_size].swapaxes(-1, -2)) * q.shape[2] ** -0.5
        state = unscaled_merge(state, Partial.of_block(scores, v[:, j : j + block_size]))
    return state.finish()[0]


@pytest.mark.parametrize("visible", MASKS, ids=str)
@pytest.mark.parametrize("num_q", [1, 7, 29])
def test_every_block_size_gives_the_plain_result(visible: Visible, num_q: int) -> None:
    q, k, v = make(4, 2, num_q, 29)
    want, want_lse = plain_attention(q, k, v, visible=visible)
    for block_size in range(1, 32):
        out, lse = online_attention(q, k, v, block_size, visible=visible)
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_float32_stays_float32_and_close() -> None:
    q, k, v = (x.astype(np.float32) for x in make(4, 1, 9, 33))
    want, _ = plain_attention(*(x.astype(np.float64) for x in (q, k, v)))
    for block_size in (1, 4, 33, 64):
        out, lse = online_attention(q, k, v, block_size)
        assert out.dtype == lse.dtype == np.float32
        np.testing.assert_allclose(out, want, rtol=2e-6, atol=2e-6)


def test_without_rescaling_the_result_depends_on_the_blocking() -> None:
    q, k, v = make(2, 2, 5, 24)
    whole = broken_attention(q, k, v, 24)
    np.testing.assert_allclose(whole, plain_attention(q, k, v)[0], rtol=1e-12, atol=1e-12)  # one block hides the fault
    assert np.abs(broken_attention(q, k, v, 4) - whole).max() > 1e-3
    good = [online_attention(q, k, v, b)[0] for b in (4, 24)]
    assert np.abs(good[0] - good[1]).max() < 1e-12


def test_the_fault_hides_when_the_largest_score_comes_first() -> None:
    q, k, v = make(1, 1, 1, 24)
    order = np.argsort(-(q @ k.swapaxes(-1, -2))[0, 0])
    k, v = k[:, order], v[:, order]
    np.testing.assert_allclose(broken_attention(q, k, v, 4), plain_attention(q, k, v)[0], rtol=1e-12)


def test_fully_masked_blocks_and_rows_leave_no_nan() -> None:
    q, k, v = make(2, 1, 12, 5)  # causal with more queries than keys: the first 7 rows see nothing
    out, lse = online_attention(q, k, v, 2, visible=Visible(causal=True))
    assert np.isfinite(out).all()
    assert (out[:, :7] == 0).all() and np.isneginf(lse[:, :7]).all()
    assert np.isfinite(lse[:, 7:]).all()
    out, _ = online_attention(q, k[:, :0], v[:, :0], 4)
    assert (out == 0).all()


@pytest.mark.parametrize("size", [1e2, 1e8, 1e150])
def test_extreme_scores_neither_overflow_nor_vanish(size: float) -> None:
    q, k, v = make(1, 1, 6, 20)
    q = q * size
    want, _ = plain_attention(q, k, v)
    for block_size in (1, 3, 20):
        out, lse = online_attention(q, k, v, block_size)
        assert np.isfinite(out).all() and np.isfinite(lse).all()
        np.testing.assert_allclose(out, want, rtol=1e-10, atol=1e-10)
    low, _ = online_attention(q, -np.abs(k), v, 3)
    assert np.isfinite(low).all()


def test_partials_merge_in_any_order_and_grouping() -> None:
    q, k, v = make(2, 2, 4, 30)
    scores = q @ k.swapaxes(-1, -2)
    parts = [Partial.of_block(scores[..., s], v[:, s]) for s in (slice(0, 3), slice(3, 17), slice(17, 30))]
    want = Partial.of_block(scores, v).finish()
    for x, y, z in itertools.permutations(parts):
        for merged in (x.merge(y).merge(z), x.merge(y.merge(z))):
            for got, expected in zip(merged.finish(), want):
                np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
    nothing = Partial.nothing((2, 4), 8, np.dtype(np.float64))
    for both in (nothing.merge(parts[0]), parts[0].merge(nothing)):
        for got, expected in zip(both.finish(), parts[0].finish()):
            np.testing.assert_array_equal(got, expected)
    assert np.isneginf(nothing.merge(nothing).m).all()


def test_finished_parts_merge_from_their_log_sum_exp() -> None:
    q, k, v = make(4, 2, 3, 40)
    want, want_lse = plain_attention(q, k, v)
    cuts = [0, 1, 16, 16, 40]  # the empty part in the middle is (0, -inf)
    parts = [plain_attention(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(cuts)]
    for chosen in (parts, parts[::-1]):
        out, lse = merge_outputs(chosen)
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-12)


@settings(max_examples=120)
@given(
    lengths=st.tuples(st.integers(1, 20), st.integers(1, 40)),
    group=st.integers(1, 3),
    block_size=st.integers(1, 48),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 50),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_no_shape_mask_or_blocking_breaks_equality(
    lengths: tuple[int, int], group: int, block_size: int, causal: bool, window: int | None, size: float, seed: int
) -> None:
    q, k, v = make(2 * group, 2, *lengths, seed=seed)
    visible = Visible(causal, window)
    want, want_lse = plain_attention(q * size, k, v, visible=visible)
    out, lse = online_attention(q * size, k, v, block_size, visible=visible)
    np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-12)
