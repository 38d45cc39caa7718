"""Pieces that the training kernels share: finding a program's sequence, loading tiles, masks, keyed dropout.

Packed sequences: tensor [T, H, D] contiguous, sequence s owns tokens cu[s] .. cu[s + 1]. Work is cut into tiles of
BLOCK tokens of one sequence, numbered without knowing the lengths on the host:

    tile numbers   |<- sequence 0 ->|..|<--- sequence 1 --->|..|        first(s) = cu[s] // BLOCK + s
                                     ^ surplus numbers: their programs find no token and return

so a grid of T // BLOCK + S programs covers every tile, and nothing is copied from the device to launch it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of_tile(cu, num_seqs, tile, BLOCK: tl.constexpr):
    """The sequence a tile number belongs to: the last s with cu[s] // BLOCK + s <= tile, by bisection."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu + middle) // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def padded_rows(x, head, num_tiles, start, seq, ROWS: tl.constexpr):
    """Where a sequence's rows begin in an fp32 [H, num_tiles * ROWS] that gives each sequence whole tiles of ROWS rows,
    so that a kernel may read a tile's rows without a mask."""
    return x + (tl.cast(head, tl.int64) * num_tiles + start // ROWS + seq) * ROWS


@triton.jit
def stream_tile(descriptor, row, head, ROWS: tl.constexpr, BD: tl.constexpr):
    """ROWS tokens from `row` on of one head, [ROWS, BD], through a descriptor of [T, H, D] (on Hopper: TMA, which keeps
    addresses and masks out of the registers). Past D and past T it gives 0; past a sequence's end it gives the next
    sequence's tokens, which the caller must weigh with 0."""
    return descriptor.load([row, head, 0]).reshape(ROWS, BD)


@triton.jit
def load_tile(base, first, rows, cols, limit, STRIDE: tl.constexpr, D: tl.constexpr):
    """Rows first + rows below `limit` and columns below D of a matrix with row stride STRIDE; 0 elsewhere.

    The int64 step to the tile is scalar; offsets inside it fit int32.
    """
    pointers = base + tl.cast(first, tl.int64) * STRIDE + rows[:, None] * STRIDE + cols[None, :]
    return tl.load(pointers, mask=((first + rows) < limit)[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def store_tile(base, first, rows, cols, limit, value, STRIDE: tl.constexpr, D: tl.constexpr):
    """Store the rows below `limit` and the columns below D, in the tensor's dtype."""
    pointers = base + tl.cast(first, tl.int64) * STRIDE + rows[:, None] * STRIDE + cols[None, :]
    mask = ((first + rows) < limit)[:, None] & (cols < D)[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def visible(position, key, num_keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """True where a query at `position` sees `key`; the two broadcast against each other. WINDOW 0: no window."""
    seen = key < num_keys
    if CAUSAL:
        seen = seen & (key <= position)
    if WINDOW > 0:
        seen = seen & (key > position - WINDOW)
    return seen


@triton.jit
def kept(seed, head, row, key, threshold):
    """Dropout: True where the weight of (head, row, key) stays. `row` is the packed query, `key` the key's place in
    its sequence; both broadcast, so the transposed tile of the backward asks for the very same draws.

    Philox-4x32-10 keyed by the seed with the counter (key, row, head, 0); a weight stays if its first 32 bits are at
    or above `threshold` = p 2^32. Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    zero = (row * 0) + (key * 0)
    bits, _, _, _ = tl.philox(seed, key + zero, row + zero, head + zero, zero)
    return bits >= threshold
