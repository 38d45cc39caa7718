"""What is asked: prompts as token ids of exact length, output lengths, and which request waits for which. No clock.

A prefix cache is a chain of hashes, so the first token decides whether anything can hit: every prompt that is to be
cold begins with tokens drawn from the run's nonce and its own number, and shared prefixes with the nonce alone.

    unique          [own mark][random ids ...............................]
    shared prefix   [nonce mark][same ids for all ....][own mark][random ids]       asked input = prefix + rest
    multi-turn      turn k = turn k-1 + stand-in answer + new question; k waits for k-1
    blocks          a trace's block hashes, each standing for the same 512 ids wherever it appears
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from steelyard.errors import InvalidRequest

GROUPS: dict[str, tuple[int, int]] = {
    "short-short": (256, 128),
    "long-short": (4096, 128),
    "short-long": (256, 1024),
    "long-long": (4096, 1024),
}
"""Input and output tokens of the four groups."""
TRACE_BLOCK_TOKENS = 512
_MARK_TOKENS = 2

Cache = Literal["cold", "primed"]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to be sent. `after`: the id of the request that must have ended before."""

    id: int
    group: str
    prompt_ids: tuple[int, ...]
    output_len: int
    text: str | None = None
    after: int | None = None
    shared_len: int = 0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids that prompts are drawn from, low <= id < high, less the special ones."""

    low: int = 100
    high: int = 30_000
    special: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.high - self.low < 16:
            raise InvalidRequest(
                f"--vocab-size: prompts need at least 16 different ids, got {self.low} to {self.high}",
                param="vocab_size",
            )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens asked for. `spread` r draws uniformly from length * (1 - r) to length * (1 + r), as vLLM's range ratio."""

    input_len: int
    output_len: int
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1:
            raise InvalidRequest(f"lengths must be at least 1 token, got {self.input_len} and {self.output_len}")
        if not 0.0 <= self.spread < 1.0:
            raise InvalidRequest(f"--random-range-ratio must be in [0, 1), got {self.spread:g}")


Plan = list[PlannedRequest]


class PromptMaker:
    """Makes prompts from a seed and a nonce: lengths and shapes follow the seed, cache identity the nonce.

    Arms of a comparison share the seed and have a nonce each, so they do the same work and share no cache entry.
    """

    def __init__(self, seed: int, nonce: str, vocabulary: Vocabulary) -> None:
        self.seed, self.nonce = seed, nonce
        self._ids = [i for i in range(vocabulary.low, vocabulary.high) if i not in vocabulary.special]

    def unique(self, lengths: Lengths, count: int, group: str, first_id: int = 0) -> list[PlannedRequest]:
        """`count` prompts that share no prefix with one another or with any other run."""
        draw = random.Random(f"lengths {self.seed} {group}")
        found = []
        for number in range(first_id, first_id + count):
            input_len, output_len = _drawn(draw, lengths)
            ids = self._marked(f"{group} {number}", input_len)
            found.append(PlannedRequest(number, group, ids, output_len))
        return found

    def shared_prefix(
        self, lengths: Lengths, count: int, prefix_len: int, num_prefixes: int = 1, first_id: int = 0
    ) -> list[PlannedRequest]:
        """Prompts of prefix_len + input_len tokens: the prefix comes on top of the asked input, never out of it."""
        if prefix_len < 1 or num_prefixes < 1:
            raise InvalidRequest(f"--shared-prefix must be at least 1 token, got {prefix_len}", param="shared_prefix")
        prefixes = [self._marked(f"prefix {k}", prefix_len) for k in range(num_prefixes)]
        found = []
        for rest in self.unique(lengths, count, "shared-prefix", first_id):
            prefix = prefixes[rest.id % num_prefixes]
            shared_len = prefix_len if rest.id - first_id >= num_prefixes else 0
            found.append(replace(rest, prompt_ids=prefix + rest.prompt_ids, shared_len=shared_len))
        return found

    def multi_turn(
        self, lengths: Lengths, num_sessions: int, num_turns: int, first_id: int = 0
    ) -> list[PlannedRequest]:
        """Sessions whose turns carry the whole history. Answers in the history are stand-ins, alike in every arm.

        So the work does not depend on what a model says; a cache can reuse a turn's prompt, not its answer.
        """
        if num_turns < 1:
            raise InvalidRequest(f"--turns must be at least 1, got {num_turns}", param="turns")
        found: list[PlannedRequest] = []
        for turn in range(num_turns):
            for session in range(num_sessions):
                number = first_id + turn * num_sessions + session
                question = self._marked(f"session {session} turn {turn}", lengths.input_len)
                if turn == 0:
                    found.append(PlannedRequest(number, "multi-turn", question, lengths.output_len))
                    continue
                before = found[(turn - 1) * num_sessions + session]
                answer = self._marked(f"session {session} answer {turn}", lengths.output_len)
                ids = before.prompt_ids + answer + question
                shared_len = len(before.prompt_ids)
                found.append(PlannedRequest(number, "multi-turn", ids, lengths.output_len, None, before.id, shared_len))
        return found

    def blocks(self, number: int, hashes: Sequence[int], input_len: int, output_len: int) -> PlannedRequest:
        """A request of a trace that has block hashes: equal hashes are equal ids, in this run alone."""
        ids: list[int] = []
        for value in hashes:
            ids += self._marked(f"block {value}", TRACE_BLOCK_TOKENS)
        if len(ids) < input_len:
            ids += self._marked(f"tail {number}", input_len - len(ids))
        return PlannedRequest(number, "trace", tuple(ids[:input_len]), output_len)

    def _marked(self, what: str, length: int) -> tuple[int, ...]:
        """Ids that begin with a mark made of nonce and name; the rest follows the seed alone."""
        digest = int.from_bytes(hashlib.sha256(f"{self.nonce} {what}".encode()).digest()[:8], "big")
        base = len(self._ids)
        mark = [self._ids[digest // base**k % base] for k in range(min(_MARK_TOKENS, length))]
        draw = random.Random(f"ids {self.seed} {what}")
        return tuple(mark + draw.choices(self._ids, k=length - len(mark)))


def _drawn(draw: random.Random, lengths: Lengths) -> tuple[int, int]:
    if lengths.spread == 0.0:
        return lengths.input_len, lengths.output_len
    low, high = 1.0 - lengths.spread, 1.0 + lengths.spread
    asked = (lengths.input_len, lengths.output_len)
    first, second = (draw.randint(max(round(n * low), 1), round(n * high)) for n in asked)
    return first, second


def group_lengths(names: Sequence[str], divisor: int = 1) -> dict[str, Lengths]:
    """The named groups, or all four for "all"; shortened ones say so in their names. Raises InvalidRequest."""
    if not 1 <= divisor <= 128:
        raise InvalidRequest(f"--group-divisor must be 1 to 128, got {divisor}", param="group_divisor")
    chosen = list(GROUPS) if list(names) == ["all"] else list(names)
    by_lengths = {f"{i}/{o}": name for name, (i, o) in GROUPS.items()}
    found = {}
    for name in chosen:
        key = by_lengths.get(name, name)
        if key not in GROUPS:
            raise InvalidRequest(f"--group must be all or of {', '.join(GROUPS)}, got {name!r}", param="group")
        input_len, output_len = GROUPS[key]
        found[key if divisor == 1 else f"{key}/{divisor}"] = Lengths(input_len // divisor, output_len // divisor)
    return found


def digest(requests: Sequence[PlannedRequest]) -> str:
    """A hash of the work: lengths and order, not the nonce's marks, so that arms with the same work agree."""
    lengths = [(r.group, len(r.prompt_ids), r.output_len, r.after, r.shared_len) for r in requests]
    return hashlib.sha256(repr(lengths).encode()).hexdigest()[:16]


def num_repeated(requests: Sequence[PlannedRequest], block: int = 16) -> int:
    """Requests whose first block another one has too and whose plan declares nothing shared: a hidden cache hit."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for request in requests:
        head = request.prompt_ids[:block]
        repeated += head in seen and not request.shared_len and request.group != "trace"
        seen.add(head)
    return repeated
