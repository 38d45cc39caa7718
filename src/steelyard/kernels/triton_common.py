"""Pieces that all serving kernels share: early launch, block ids of a paged pool, the online softmax. No launcher.

Programmatic dependent launch: a kernel started with `launch_pdl=True` may begin while its predecessor still runs.
The rules that keep a chain of them right:

    * every kernel of the chain waits (`wait_for_predecessor`), also a program that has nothing to do;
    * before the wait it reads only what no earlier kernel of the step writes: weights and the step's tables;
    * a kernel in front of one with large programs lets it in only after its own wait. Let in earlier, they settle on
      the multiprocessors that happen to be free and stay unevenly spread: 38 us of decode attention became 47;
    * the kernel after the one that writes the step's tables is started without early launch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
"""exp(x) is exp2(x * LOG2E)."""
NO_WINDOW = 2**30
"""A window longer than any context, for kernels that take it as a number."""


def early(pdl: bool) -> dict[str, bool]:
    """The launch option for programmatic dependent launch, absent where it is off."""
    return {"launch_pdl": True} if pdl else {}


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@triton.jit
def let_successor_in(PDL: tl.constexpr):
    """The next kernel of the stream may start now; it still waits for this one's end before it reads its results."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Until here nothing that an earlier kernel of the chain writes may be read."""
    if PDL:
        gdc_wait()


@triton.jit
def block_ids(table, key, last_key, n, BLOCK: tl.constexpr, BN: tl.constexpr):
    """Pool blocks of keys key .. key + BN, a scalar if one block holds them all; keys after last_key share its block.

    Loop-carried by the callers: loaded one tile ahead, an id costs the software pipeline no stage.
    """
    if BLOCK >= BN:
        ids = tl.load(table + tl.minimum(key, last_key) // BLOCK)
    else:
        ids = tl.load(table + tl.minimum(key + n, last_key) // BLOCK)
    return ids


@triton.jit
def kv_offsets(ids, key, n, kv_head, block_stride, BLOCK: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    """int64 element offsets of keys key + n in a [blocks, Hkv, BLOCK, D] pool with a free block stride.

    key is a multiple of BN, and one of BN and BLOCK a multiple of the other: what depends on n leaves the loop.
    """
    if BLOCK > BN:
        inside = key % BLOCK + n
    else:
        inside = n % BLOCK
    return ids.to(tl.int64) * block_stride + (kv_head * (BLOCK * D) + inside * D)


@triton.jit
def to_stored(x, scale, dtype: tl.constexpr, SCALED: tl.constexpr):
    """x as a pool of `dtype` holds it: kv_fp8.to_stored. NaN stays NaN."""
    y = x
    if SCALED:
        y = x.to(tl.float32) / scale
        y = tl.where(y > 448.0, 448.0, tl.where(y < -448.0, -448.0, y))
    return y.to(dtype)


@triton.jit
def _butterfly(x, H: tl.constexpr, D: tl.constexpr):
    """Pairs H apart of x [R, DP] become their sum and difference, in those blocks of D that hold such pairs.

    The other of a pair is what the sum of both, as integers, leaves: exact, and a single shuffle within a warp, or
    nothing where a thread has both.
    """
    R: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // (2 * H)
    LAST: tl.constexpr = D // (2 * H)
    y = x
    if LAST > 0:
        pairs = tl.reshape(x, [R, GROUPS, 2, H])
        bits = pairs.to(tl.int32, bitcast=True)
        both = tl.sum(bits, 2, keep_dims=True).to(tl.int64).to(tl.int32)  # the interpreter's sums are int64 anyway
        other = (both - bits).to(tl.float32, bitcast=True)
        sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, None, :, None]
        found = other + pairs * sign  # a select here would keep predicates alive through decode's loop: 7 % longer
        if LAST * 2 * H < D:
            found = tl.where((tl.arange(0, GROUPS) < LAST)[None, :, None, None], found, pairs)
        y = tl.reshape(found, [R, x.shape[1]])
    return y


@triton.jit
def hadamard(x, D: tl.constexpr):
    """kv_fp8.hadamard of float32 x [R, DP], DP at most 256, whose columns from D on are 0.

    The fast transform, sums and differences from the farthest pairs to the nearest: the same bits in every kernel.
    """
    d = tl.arange(0, x.shape[1])
    size = tl.full([x.shape[1]], 1.0, tl.float32)
    for b in tl.static_range(7, -1, -1):
        x = _butterfly(x, 1 << b, D)
    for b in tl.static_range(8, -1, -1):
        if D & (1 << b):
            size = tl.where(d >= D // (2 << b) * (2 << b), (1 << b) ** -0.5, size)
    return x * size[None, :]


@triton.jit
def query_in(q, D: tl.constexpr, SCALED: tl.constexpr):
    """Queries [R, DP] as their product takes them: beside an fp8 pool in the basis of its keys, and in float16, which
    holds e4m3 exactly and costs one hardware instruction a pair of numbers; float32 stays."""
    y = q
    if SCALED:
        y = hadamard(q.to(tl.float32), D)
        if q.dtype != tl.float32:
            y = y.to(tl.float16)
    return y


@triton.jit
def soft_cap(s, cap):
    """cap * tanh(s / cap), with tanh(x) = 1 - 2 / (1 + e^2x): exact at both ends, no overflow."""
    return cap * (1.0 - 2.0 / (1.0 + tl.math.exp2(s * (2.0 * LOG2E / cap))))


@triton.jit
def logits_log2(qk, scale, cap, SOFTCAP: tl.constexpr):
    """Attention logits in base 2 from raw products."""
    if SOFTCAP:
        s = soft_cap(qk * scale, cap) * LOG2E
    else:
        s = qk * (scale * LOG2E)
    return s


@triton.jit
def online_softmax(s, m, den):
    """One step over a tile of base-2 logits s [M, N]: (p, m, den, alpha); m starts finite, so no row makes a NaN.

    Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", in base 2.
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.math.exp2(s - m_new[:, None])
    alpha = tl.math.exp2(m - m_new)
    return p, m_new, den * alpha + tl.sum(p, 1), alpha


@triton.jit
def normalised(acc, den):
    """acc / den; a row that saw no key is 0."""
    return acc * tl.where(den > 0, 1.0 / tl.where(den > 0, den, 1.0), 0.0)[:, None]
