"""Guesses for tokens to come, looked up in the request's own text, and how many are worth a step. No model of any kind.

    known tokens   ... a b c | d e f ...            ... a b c |        the last NGRAM tokens stood there before
                                                     guesses:  d e f   checked in the same step as the next token

A guess is right if the sampler, at its place, draws the same token: draws are keyed by (seed, position), so what comes
out is what would have come without guesses, greedy or sampled, but for the rounding of other shapes. Prompt lookup
decoding (Saxena, 2023); the check is speculative decoding's (Leviathan et al., 2023) for a draft of certainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.scheduler.rows import Resident

NGRAM = 3
MEMORY = 0.8
"""How much of a request's estimate of acceptance each step keeps."""
PATIENCE = 16
"""Steps without a guess after which a request whose guesses failed gets one more."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """most   guesses for a row in a step; 0 is off
    load      tokens that a step of decodes takes without growing: beyond them a guess costs time
    """

    most: int = 0
    load: int = 4


OFF = Speculation()


class NgramIndex:
    """Where each run of NGRAM tokens was last followed by something: position of what followed."""

    __slots__ = ("_after", "_num_seen")

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._num_seen = NGRAM

    def find(self, tokens: Sequence[int]) -> int | None:
        """Where to copy from, for the end of `tokens`; they have only grown since the last call."""
        after = self._after
        for end in range(self._num_seen, len(tokens)):
            after[tuple(tokens[end - NGRAM : end])] = end
        self._num_seen = max(NGRAM, len(tokens))
        return after.get(tuple(tokens[-NGRAM:]))


class Guesser:
    """A resident's index and how its guesses fared. Made at its first decode, lost with its row."""

    __slots__ = ("_index", "_num_without", "acceptance")

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._num_without = 0
        self.acceptance = 1.0

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, int]:
        """(how many, copied from where), at most `most`; fewer where few came true before. (0, 0): none."""
        source = self._index.find(tokens)
        if source is None:
            return 0, 0
        wanted = round(most * self.acceptance)
        if not wanted:
            self._num_without += 1
            wanted = int(self._num_without % PATIENCE == 0)
        num_drafts = min(most, wanted, len(tokens) - source)
        return (num_drafts, source) if num_drafts > 0 else (0, 0)

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        self.acceptance = MEMORY * self.acceptance + (1 - MEMORY) * num_accepted / num_drafts


def guess_for(resident: Resident, most: int) -> tuple[int, int]:
    """Guesses for a row that decodes and whose last token is committed; never beyond its end or its blocks."""
    request = resident.request
    sampling = request.sampling
    known = len(request.tokens)
    most = min(most, resident.end_len - 1 - known, resident.room - known)
    is_penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    if most <= 0 or request.has_grammar or is_penalised:
        return 0, 0
    if resident.guesser is None:
        resident.guesser = Guesser()
    return resident.guesser.guess(request.tokens, most)
