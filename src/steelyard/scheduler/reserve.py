"""How many blocks stay free when a request is admitted beside others: a watermark, and a share of what the running
ones will still write. The share is learned: it grows with each preemption and fades while there is none.

    spare = watermark + share * (output that running requests may still make)

With share 0 the pool is filled with prompts; with 1 nobody admitted is ever preempted for want of blocks.
"""

from __future__ import annotations

from math import ceil

from steelyard.scheduler.live import Live

_RISE = 0.1
_FADE = 0.995
_LEAST = 0.01
"""Below this the share is 0."""


class Reserve:
    """`observe` is called once a pass, `blocks` at each admission."""

    def __init__(self, live: Live, watermark: float) -> None:
        self._live = live
        self._watermark_blocks = ceil(watermark * live.cache.smallest_pool())
        self._num_preemptions = 0
        self.share = 0.0

    def observe(self) -> None:
        """Learn from the preemptions since the last pass."""
        total = self._live.counters.preemptions
        if total > self._num_preemptions:
            self.share = min(1.0, self.share + _RISE * (total - self._num_preemptions))
            self._num_preemptions = total
        elif self.share:
            self.share = self.share * _FADE if self.share > _LEAST else 0.0

    def blocks(self) -> int:
        """Blocks to be left in every group; none while nobody runs, so that somebody always can."""
        rows = self._live.rows
        if not rows.num_running:
            return 0
        if not self.share:
            return self._watermark_blocks
        residents = (*rows.decodes, *rows.prefills, *rows.paused)
        lacking = sum(r.end_len - max(r.room, len(r.request.tokens)) for r in residents if r.end_len > r.room)
        return self._watermark_blocks + ceil(self.share * lacking / self._live.cache.block_size)
