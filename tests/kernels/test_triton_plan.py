"""The step's tables, made on the device, against the same written as loops."""

from __future__ import annotations

import torch

from steelyard.kernels.triton_attention import TritonAttention
from steelyard.kernels.triton_configs import AttentionShape
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


def test_a_full_machine_splits_only_rows_beyond_twice_the_mean() -> None:
    for ctx, split in ((1500, False), (9000, True)):
        attention = planned([(1, 1000), (1, 1000), (1, 1000), (1, ctx)], num_decode=4, target_programs=4)
        parts = attention._rows.view(-1, 4)[:4, 1].tolist()
        assert parts[:3] == [1, 1, 1] and (parts[3] > 1) == split
