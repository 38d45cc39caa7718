"""Where the shared prefixes of prompts break, what that costs, and what moving the varying part to the end would save.

A prefix cache reuses tokens up to the first that differs. A prompt whose long common text comes after a time stamp, a
request id or a shuffled list is computed whole. Works on token ids or block hashes; text is looked at only if allowed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import fmean

_LEAST_RUN = 16
_RECENT = 16
_KINDS = (
    ("a date or time", re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}:\d\d")),
    ("an id", re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}|\b[0-9a-f]{12,}\b", re.I)),
    ("a number", re.compile(r"\d")),
)


@dataclass(frozen=True, slots=True)
class Break:
    """One prompt against the earlier one it has most in common with, in tokens (or in units of a hash).

    shared  what a cache reuses today: the common beginning
    common  all that is alike, in runs long enough to matter
    varies  the differing part at the break: its place, length, and text if that may be seen
    """

    shared: int
    common: int
    at: int
    varies_len: int
    kind: str
    moved: bool


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Over all prompts: mean tokens, reused today, and reusable if what varies came last."""

    num_prompts: int
    mean_len: float
    reused_share: float
    reusable_share: float
    saved_tokens: float
    common_break: int | None
    kinds: tuple[tuple[str, int], ...]
    num_moved: int

    def text(self) -> str:
        """For a person."""
        lines = [
            f"{self.num_prompts} prompts of {self.mean_len:.0f} tokens: a cache reuses {self.reused_share:.1%};",
            f"with what varies at the end it could reuse {self.reusable_share:.1%},",
            f"{self.saved_tokens:.0f} tokens a prompt more.",
        ]
        if self.common_break is not None:
            lines.append(f"Most break at token {self.common_break}.")
        lines += [f"{count} times {kind} stands there." for kind, count in self.kinds]
        if self.num_moved:
            lines.append(f"{self.num_moved} prompts have the same parts in another order: keep one order.")
        return "\n".join(lines) + "\n"


def look(
    prompts: Sequence[Sequence[Hashable]], texts: Sequence[Sequence[str]] | None = None, unit: int = 1
) -> Prefixes | None:
    """Compare each prompt with the ones before it. `texts`: what stands at each position, only if it may be seen.

    unit  tokens that one element stands for (a block's size for hashes)
    Returns None for fewer than two prompts.
    """
    found = [_against(prompts, i, texts, unit) for i in range(1, len(prompts))]
    if not found:
        return None
    total = sum(len(p) for p in prompts) * unit
    gains = [b for b in found if b.common > b.shared]
    breaks = Counter(b.at * unit for b in gains)
    kinds = Counter(b.kind for b in gains if b.kind)
    return Prefixes(
        num_prompts=len(prompts),
        mean_len=fmean(len(p) * unit for p in prompts),
        reused_share=sum(b.shared for b in found) * unit / total,
        reusable_share=sum(max(b.common, b.shared) for b in found) * unit / total,
        saved_tokens=sum(b.common - b.shared for b in gains) * unit / len(prompts),
        common_break=breaks.most_common(1)[0][0] if breaks else None,
        kinds=tuple(kinds.most_common(3)),
        num_moved=sum(b.moved for b in gains),
    )


def common_prefix(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Elements alike from the beginning."""
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count


def _against(prompts: Sequence[Sequence[Hashable]], i: int, texts: Sequence[Sequence[str]] | None, unit: int) -> Break:
    mine = prompts[i]
    least = max(_LEAST_RUN // unit, 1)
    shared = max(common_prefix(mine, other) for other in prompts[:i])
    best, partner, runs = shared, i - 1, []
    for j in range(max(i - _RECENT, 0), i):
        matcher = SequenceMatcher(None, prompts[j], mine, autojunk=False)
        blocks = [b for b in matcher.get_matching_blocks() if b.size >= least]
        common = sum(b.size for b in blocks)
        if common > best:
            best, partner, runs = common, j, blocks
    at = common_prefix(mine, prompts[partner])
    after = next((b.b for b in runs if b.b > at), at)
    kind = _kind(" ".join(texts[i][at:after])) if texts is not None and after > at else ""
    moved = Counter(mine) == Counter(prompts[partner]) and tuple(mine) != tuple(prompts[partner])
    return Break(shared, best, at, after - at, kind, moved)


def _kind(text: str) -> str:
    return next((name for name, pattern in _KINDS if pattern.search(text)), "text of its own")
