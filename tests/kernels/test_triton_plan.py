"""The step's tables, made on the device, against the same written as loops."""

from __future__ import annotations

import random

import pytest
import torch

from steelyard.kernels.triton_attention import TritonAttention
from steelyard.kernels.triton_configs import AttentionShape
from steelyard.kernels.triton_plan import most_items
from tests.kernels.paged import DEVICE, Layout, problem

LAYOUT = Layout(num_heads=1, num_kv_heads=1, head_dim=64, block_size=16)
TOKENS = 64  # of a float32 prefill tile with one head


def planned(
    rows: list[tuple[int, int]], num_decode: int, target_programs: int = 256, windows: tuple[int | None, ...] = (None,)
) -> TritonAttention:
    shape = AttentionShape(1, 1, 64, 16, max_rows=8, max_tokens=2048, windows=windows, dtype=torch.float32,
                           target_programs=target_programs)  # fmt: skip
    attention = TritonAttention(shape, DEVICE)
    attention.prepare(problem(rows, LAYOUT, num_decode=num_decode).batch)
    return attention


def test_prefill_tiles_cover_each_row_once_with_the_longest_first() -> None:
    rows = [(1, 9), (130, 130), (70, 200), (64, 64), (130, 130), (2, 200), (3, 3)]
    attention = planned(rows, num_decode=1)
    expected: list[tuple[int, int, int, int]] = []
    token = 0
    for row, (new, ctx) in enumerate(rows):
        starts = range(0, new if new > 1 else 0, TOKENS)
        expected += [(row, token + done, ctx - new + done, min(TOKENS, new - done)) for done in starts]
        token += new
    expected.sort(key=lambda t: (-(t[2] + t[3]), t[0]))
    assert int(attention._tile_count[0]) == len(expected)
    assert [tuple(t) for t in attention._tiles.view(-1, 4)[: len(expected)].tolist()] == expected


def test_decode_items_tile_every_rows_keys_in_order() -> None:
    rows = [(1, 700), (1, 1), (1, 33), (1, 0), (5, 5)]
    attention = planned(rows, num_decode=4, target_programs=8, windows=(None, 100))
    for which, window in enumerate((None, 100)):
        items = attention._items.view(-1, 8)[which * 13 : (which + 1) * 13]
        count, at = int(attention._counts.view(-1, 4)[which, 0]), 0
        split = 0
        for row, (_, ctx) in enumerate(rows[:4]):
            key = 0 if window is None else max(0, ctx - window) // 32 * 32
            parts = int(items[at, 5])
            split += parts > 1
            assert parts >= 1
            for part in range(parts):
                got = items[at + part].tolist()
                assert got[:2] == [row, row] and got[4:7] == [at, parts, ctx] and got[2] == key and got[2] % 32 == 0
                key = got[3]
            assert key == ctx
            at += parts
        assert at == count <= 5 + 8 and split > 0


@pytest.mark.parametrize(
    ("ctxs", "parts"),
    [
        ((1000, 1000, 1000, 1200), (1, 1, 1, 1)),  # even: rows alone keep the machine busy
        ((1000, 1000, 1000, 1500), (2, 2, 2, 3)),  # uneven: parts of 512, since contexts are short
        ((100, 100, 100, 9000), (1, 1, 1, 16)),  # 9,300 keys for 16 parts
        ((9000, 100), (4, 1)),  # two rows do not keep it busy: 4 parts share all keys, even or not
    ],
)
def test_a_busy_machine_splits_rows_only_if_they_are_uneven(ctxs: tuple[int, ...], parts: tuple[int, ...]) -> None:
    attention = planned([(1, ctx) for ctx in ctxs], num_decode=len(ctxs), target_programs=4)
    assert tuple(attention._rows.view(-1, 4)[: len(ctxs), 1].tolist()) == parts


def test_items_of_any_lengths_fit_the_table_and_cover_every_key() -> None:
    rng = random.Random(7)
    for case in range(60):
        num_rows, top = rng.randint(1, 8), rng.choice((40, 400, 4000))
        ctxs = [max(0, round(top * rng.random() ** rng.choice((0.1, 1, 8)))) for _ in range(num_rows)]
        attention = planned([(1, ctx) for ctx in ctxs], num_decode=num_rows, target_programs=rng.randint(1, 8))
        count = int(attention._counts[0])
        assert count <= most_items(num_rows, attention._spread) == attention._num_items(num_rows), case
        items = attention._items.view(-1, 8)[:count].tolist()
        for row, ctx in enumerate(ctxs):
            ends = [(lo, hi) for r, _, lo, hi, *_ in items if r == row]
            assert [lo for lo, _ in ends] == [0, *(hi for _, hi in ends[:-1])] and ends[-1][1] == ctx, case
