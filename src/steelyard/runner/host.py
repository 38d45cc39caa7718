"""The host tier's memory: a twin of each group's pool in host memory, and copies between them, off the step's stream.

    compute  ... step N - 1 ...............|wait| copies | step N ...
    side          | out out out | in in in |done

What a swap touches was last used by steps that the host has collected: a victim has no row in flight, an evicted block
no owner, a block that is filled was free. So the side stream waits for nothing and runs beside the step in flight; the
new step waits for it, before its own copies and its work. A block is one run of memory over all layers of its group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from steelyard.core.step import Swap
from steelyard.errors import StartError

PIECE_BYTES = 2**30
"""Pinned at once, at most: torch rounds what it pins up to a power of two, which a piece of this size nearly fills."""
MEASURED_BYTES = 64 * 2**20
MEASURED_TIMES = 4


class Queue(Protocol):
    """Where copies run."""

    def copying(self) -> AbstractContextManager[None]:
        """Copies issued inside are ordered among themselves; what is launched after it finds them done."""
        ...


class SideQueue:
    """A stream of its own, and the event that the current stream waits for. Made once; a step allocates nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    @contextmanager
    def copying(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield
            self._done.record(self._stream)
        torch.cuda.current_stream(self._stream.device).wait_event(self._done)


class InlineQueue:
    """Where launching is computing: a copy is done when it returns."""

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()


class HostPool:
    """Slots of the host tier, numbered from 1.

    pieces[g]  tensors [n, ...] of group g's block shape, one slot after another; all but the last of equal size
    """

    def __init__(
        self,
        pools: Sequence[Tensor],
        num_slots: Sequence[int],
        queue: Queue | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """`pools`: the device's, [blocks + 1, ...] each, whose memory stays where it is. Pinned for a GPU.

        Raises StartError where the host has no such memory.
        """
        device = pools[0].device
        on_gpu = device.type == "cuda"
        self._pools = pools
        self._queue = queue or (SideQueue(device) if on_gpu else InlineQueue())
        self.pieces = [_allocated(num, pool, piece_bytes, on_gpu) for num, pool in zip(num_slots, pools)]
        self.bandwidth = self._measure()
        """Bytes/s one way, measured: the mean of both ways."""

    @property
    def num_slots(self) -> tuple[int, ...]:
        return tuple(sum(map(len, pieces)) for pieces in self.pieces)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for pieces in self.pieces for piece in pieces)

    def swap(self, swaps: Sequence[Swap]) -> None:
        """Make a plan's moves: every `out`, then every `in`. Neighbours on both sides are one copy."""
        if not swaps:
            return
        with self._queue.copying():
            for out in (True, False):
                for group, block, slot, count in runs([s for s in swaps if s.out is out]):
                    for on_host in self._run(group, slot, count):
                        on_device = self._pools[group][block : block + len(on_host)]
                        target, source = (on_host, on_device) if out else (on_device, on_host)
                        target.copy_(source, non_blocking=True)
                        block += len(on_host)

    def _run(self, group: int, slot: int, count: int) -> Iterator[Tensor]:
        """Slots [slot, slot + count), as they lie in pieces."""
        pieces, first, end = self.pieces[group], slot - 1, slot - 1 + count
        size = len(pieces[0])
        while first < end:
            index, at = divmod(first, size)
            part = pieces[index][at : at + end - first]
            yield part
            first += len(part)

    def _measure(self) -> float:
        """Copy some blocks to and fro, in the form swaps have; the best of a few times."""
        group = max(range(len(self.pieces)), key=lambda g: self.num_slots[g] * self._pools[g][0].nbytes)
        size = self._pools[group][0].nbytes
        count = max(1, min(self.num_slots[group], len(self._pools[group]) - 1, MEASURED_BYTES // size))
        best_s = float("inf")
        for _ in range(MEASURED_TIMES):
            began = time.perf_counter()
            for out in (True, False):
                self.swap([Swap(group, 1 + i, 1 + i, out) for i in range(count)])
            if self._pools[group].device.type == "cuda":
                torch.cuda.synchronize(self._pools[group].device)
            best_s = min(best_s, time.perf_counter() - began)
        return 2 * count * size / best_s


def _allocated(num_slots: int, pool: Tensor, piece_bytes: int, pinned: bool) -> list[Tensor]:
    """Slots for blocks of `pool`, in pieces."""
    each = max(1, min(piece_bytes // pool[0].nbytes, num_slots))
    sizes = [min(each, num_slots - first) for first in range(0, num_slots, each)]
    try:
        return [torch.empty((size, *pool.shape[1:]), dtype=pool.dtype, pin_memory=pinned) for size in sizes]
    except RuntimeError as error:
        raise StartError(
            f"--swap-space: {num_slots * pool[0].nbytes:,} bytes of host memory cannot be had; give less",
            param="swap_space",
        ) from error


def runs(swaps: Sequence[Swap]) -> list[tuple[int, int, int, int]]:
    """(group, first block, first slot, count) of swaps in one direction, in order of blocks."""
    found: list[tuple[int, int, int, int]] = []
    for group, block, slot in sorted((s.group, s.device_block, s.host_slot) for s in swaps):
        if found:
            g, first_block, first_slot, count = found[-1]
            if (g, first_block + count, first_slot + count) == (group, block, slot):
                found[-1] = (g, first_block, first_slot, count + 1)
                continue
        found.append((group, block, slot, 1))
    return found


def slots_in(space_bytes: int, pools: Sequence[Tensor]) -> tuple[int, ...]:
    """Slots of each group that a host tier of so many bytes has, in proportion to the device's blocks.

    Raises StartError where a group would have none.
    """
    blocks = [(len(pool) - 1, pool[0].nbytes) for pool in pools]
    total = sum(count * size for count, size in blocks)
    found = tuple(space_bytes * count // total for count, _ in blocks)
    if min(found) < 1:
        least = -(-total // min(count for count, _ in blocks))
        raise StartError(
            f"--swap-space: {space_bytes:,} bytes hold no KV block of each kind, which takes {least:,}; "
            "give more, or 0 for no host tier",
            param="swap_space",
        )
    return found
