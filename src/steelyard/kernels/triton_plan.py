"""The step's attention work, listed on the device: decode items and prefill tiles. Arithmetic only, no attention.

A row with one new token is decoded, split over its keys; a longer one is prefilled in tiles of TOKENS tokens. Nobody
on the host knows lengths, so a captured graph serves any batch that fits its bucket: grids have the bucket's largest
number of items and surplus programs leave at once.

    items   int32 [windows, items, 8]        row, token, first key, end key, its row's first item, parts, context,
                                             keys that are left out
    rows    int32 [windows, R, 4]            first item, parts, token
    tiles   int32 [T // TOKENS + R, 4]       row, first token, its position, tokens       longest first
    counts  int32 [windows + 1, 4]           items of each window, then tiles, in the first column (16 bytes apart)

Every program repeats the cheap scan over all rows and writes its own few entries: one launch, no order between
programs, the same table each time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

ITEM_FIELDS = 8
ROW_FIELDS = 4
TILE_FIELDS = 4
COUNT_FIELDS = 4
ENTRIES = 16
"""Table entries written by one program."""
FINER = tl.constexpr(4)
"""Parts that rows of uneven lengths share, over those of even ones, where rows alone keep the machine busy."""


def most_items(rows: int, spread: int) -> int:
    """Decode items that `rows` rows make at most: parts of at least total / spread keys, and one more for each row."""
    return rows + (spread if rows < spread else FINER.value * spread)


@triton.jit
def _row_lengths(QStart, Ctx, r, num_rows):
    """(new tokens, context) of rows r; 0 for rows that do not exist."""
    live = r < num_rows
    start = tl.load(QStart + r, mask=live, other=0)
    stop = tl.load(QStart + r + 1, mask=live, other=0)
    return stop - start, tl.load(Ctx + r, mask=live, other=0)


@triton.jit
def _left_out(ctx, window, TILE: tl.constexpr, KEEP: tl.constexpr):
    """Keys before the window's first tile, less the tiles of the first KEEP keys."""
    return tl.maximum(tl.maximum(ctx - window, 0) // TILE * TILE - (KEEP + TILE - 1) // TILE * TILE, 0)


@triton.jit
def _parts(new, keys, chunk, TILE: tl.constexpr):
    """How a row is split: (keys of a part, parts). Parts are equal but for the last, in whole tiles."""
    wanted = tl.maximum((keys + chunk - 1) // chunk, 1)
    size = tl.maximum(((keys + wanted - 1) // wanted + TILE - 1) // TILE, 1) * TILE
    parts = tl.where(new == 1, tl.maximum((keys + size - 1) // size, 1), 0)
    return size, parts


@triton.jit
def _chunk(keys, spread, TILE: tl.constexpr):
    """Keys a part should have, so that `spread` parts share all keys; short contexts take half as many parts.

    With at least `spread` rows the machine is busy anyway: only rows twice the mean are split. Unless they are uneven,
    the longest over 1.25 times the mean: then the memory would wait for the long ones, and FINER times the parts share
    all keys. On an H200, 32 rows of 300 to 4,600 keys take 109 us whole and 80 in finer parts; 32 of 2,048 72 and 74.
    """
    total = tl.sum(keys.to(tl.int64), 0)
    rows = tl.sum((keys > 0).to(tl.int32), 0)
    uneven = (rows >= spread) & (4 * tl.max(keys.to(tl.int64), 0) * rows > 5 * total)
    spread *= tl.where(uneven, FINER, 1)
    even = (total + spread - 1) // spread
    half = (2 * total + spread - 1) // spread
    chunk = tl.maximum(even, tl.minimum(half, 512))
    twice = 2 * total // tl.maximum(rows, 1)
    chunk = tl.where(rows >= spread, tl.maximum(chunk, twice), chunk)
    return tl.maximum(chunk, TILE).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "max_items", "spread"])
def plan_decode(Items, Rows, Counts, Windows, QStart, Ctx, num_rows, max_items, spread,
                RB: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """Grid (items / BLOCK, windows): decode items of one window; program 0 also writes rows and the count.

    RB is a power of two not below num_rows. Items never exceed `most_items`, since a chunk has at least
    total / spread keys and a row at most one part more than its keys fill. With KEEP, keys of items are counted
    without those left out, which lie behind the first KEEP keys' tiles.
    """
    which = tl.program_id(1)
    window = tl.load(Windows + which)
    r = tl.arange(0, RB)
    new, ctx = _row_lengths(QStart, Ctx, r, num_rows)
    keys = tl.where(new == 1, ctx - _left_out(ctx, window, TILE, KEEP), 0)
    chunk = _chunk(keys, spread, TILE)
    _, parts = _parts(new, keys, chunk, TILE)
    end = tl.cumsum(parts, 0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.sum((end[None, :] <= i[:, None]).to(tl.int32), 1)
    first = tl.sum(tl.where(r[None, :] < row[:, None], parts[None, :], 0), 1)
    ok = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    new_i, ctx_i = _row_lengths(QStart, Ctx, row, num_rows)
    out_i = _left_out(ctx_i, window, TILE, KEEP)
    size, parts_i = _parts(new_i, ctx_i - out_i, chunk, TILE)
    lo = (i - first) * size
    end_i = ctx_i - out_i
    if KEEP == 0:
        lo += out_i
        end_i = ctx_i
    at = Items + (which * max_items + i) * 8
    tl.store(at, row, mask=ok)
    tl.store(at + 1, tl.load(QStart + row), mask=ok)
    tl.store(at + 2, lo, mask=ok)
    tl.store(at + 3, tl.minimum(lo + size, end_i), mask=ok)
    tl.store(at + 4, first, mask=ok)
    tl.store(at + 5, parts_i, mask=ok)
    tl.store(at + 6, ctx_i, mask=ok)
    tl.store(at + 7, out_i, mask=ok)
    if tl.program_id(0) == 0:
        tl.store(Counts + which * 4, tl.sum(parts, 0))
        at_row = Rows + (which * num_rows + r) * 4
        tl.store(at_row, end - parts, mask=r < num_rows)
        tl.store(at_row + 1, parts, mask=r < num_rows)
        tl.store(at_row + 2, tl.load(QStart + r, mask=r < num_rows, other=0), mask=r < num_rows)


@triton.jit
def _longer(tiles, base, new, end, TOKENS: tl.constexpr):
    """Tiles of each row that end after position `end`; a row's tile t ends at base + (t + 1) TOKENS, its last at its
    context's end."""
    past = tl.maximum(end - base, 0) // TOKENS
    whole = tl.where(end < base, tiles - 1, tl.maximum(tiles - 1 - past, 0))
    return tl.where(tiles > 0, whole + (base + new > end).to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_rows", "min_new"])
def plan_prefill(Tiles, Count, QStart, Ctx, num_rows, min_new, RB: tl.constexpr, TOKENS: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Grid (tiles / BLOCK): prefill tiles of rows with at least `min_new` new tokens.

    A tile's place is the number of tiles that end later, in closed form for each row, so no sort is needed: the
    longest work starts first, ties in row order.
    """
    r = tl.arange(0, RB)
    new, ctx = _row_lengths(QStart, Ctx, r, num_rows)
    new = tl.where(new >= min_new, new, 0)
    base = ctx - new
    tiles = (new + TOKENS - 1) // TOKENS
    end = tl.cumsum(tiles, 0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.sum((end[None, :] <= i[:, None]).to(tl.int32), 1)
    first = tl.sum(tl.where(r[None, :] < row[:, None], tiles[None, :], 0), 1)
    ok = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    new_i, ctx_i = _row_lengths(QStart, Ctx, row, num_rows)
    done = (i - first) * TOKENS
    tokens = tl.minimum(new_i - done, TOKENS)
    position = ctx_i - new_i + done
    stop = position + tokens
    later = _longer(tiles[None, :], base[None, :], new[None, :], stop[:, None], TOKENS)
    not_before = _longer(tiles[None, :], base[None, :], new[None, :], stop[:, None] - 1, TOKENS)
    place = tl.sum(tl.where(r[None, :] < row[:, None], not_before, later), 1)
    at = Tiles + place * 4
    tl.store(at, row, mask=ok)
    tl.store(at + 1, tl.load(QStart + row) + done, mask=ok)
    tl.store(at + 2, position, mask=ok)
    tl.store(at + 3, tokens, mask=ok)
    if tl.program_id(0) == 0:
        tl.store(Count, tl.sum(tiles, 0))
