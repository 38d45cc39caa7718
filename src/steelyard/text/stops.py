"""What ends an answer: stop strings, looked for in a text that arrives in pieces of any size, and stop ids.

An automaton over all stop strings (Aho and Corasick 1975): a state is the longest suffix of the text that begins
some stop string. Its depth is how much must be held back; one step a character, whatever the stop strings are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from steelyard.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Match:
    """`stop` ends after `end` characters of the piece that was scanned."""

    stop: str
    end: int


class StopMatcher:
    """The first stop string to be completed wins; of several that end together, the longest.

    This does not depend on how the text is cut into pieces. `held` is the number of last characters that may yet
    turn out to begin a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = 0

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            follower = self._next[state].get(char)
            if follower is None:
                follower = len(self._next)
                self._next[state][char] = follower
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = follower
        self._found[state] = stop

    def _link(self) -> None:
        """Breadth first: a state's fallback is shorter, so it is complete by then."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, follower in self._next[state].items():
                self._fail[follower] = self._step(self._fail[state], char)
                queue.append(follower)
            if self._found[state] is None:
                self._found[state] = self._found[self._fail[state]]

    def _step(self, state: int, char: str) -> int:
        while True:
            follower = self._next[state].get(char)
            if follower is not None:
                return follower
            if state == 0:
                return 0
            state = self._fail[state]

    def scan(self, text: str, armed: bool = True) -> Match | None:
        """Reads on; stops at the first match. Not armed: matches are passed over."""
        state = self._state
        for i, char in enumerate(text):
            state = self._step(state, char)
            found = self._found[state]
            if found is not None and armed:
                self._state = state
                return Match(found, i + 1)
        self._state = state
        return None

    @property
    def held(self) -> int:
        """A state that nothing follows is a match that was passed over: what counts is the next shorter one."""
        state = self._state
        while state and not self._next[state]:
            state = self._fail[state]
        return self._depth[state]


@dataclass(frozen=True, slots=True)
class StopIds:
    """The ids that end an answer. Their own text is hidden, unless the client asked for what stopped it.

    ids  those of the request, and the model's ends of text unless these are ignored
    """

    ids: frozenset[int]
    sampling: SamplingParams

    @classmethod
    def of(cls, sampling: SamplingParams, eos_token_ids: Collection[int]) -> StopIds:
        return cls(frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids), sampling)

    def shown(self, ids: list[int], num_before: int, stop_token: int | None) -> list[int]:
        """The new `ids` whose text is shown: those before one that ends the answer, be it by its grammar's order.

        num_before  tokens of the answer before them
        stop_token  the id that ended it, None: none did, or the engine has not said so yet
        """
        if self.sampling.include_stop_str_in_output:
            return ids
        if ids and stop_token == ids[-1]:
            return ids[:-1]
        for i, token in enumerate(ids):
            if token in self.ids and num_before + i + 1 > self.sampling.min_tokens:
                return ids[:i]
        return ids

    def reason(self, stop_token: int | None) -> int | None:
        """What the client is told: an id of its own that ended the answer."""
        return stop_token if stop_token in self.sampling.stop_token_ids else None
