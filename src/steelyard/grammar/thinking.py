"""Thinking before an answer: free up to its closing mark or a budget of tokens, then the answer, held or free.

    OPEN --the opening mark--> FREE --the closing mark, or the budget: it is forced--> GAP --newlines or not--> ANSWER
      '--anything else: there is no thinking-----------------------------------------------------------------^

A `Thinking` travels as the text of a grammar; its walker is one like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

_PREFIX = '{"thinking":'


@dataclass(frozen=True, slots=True)
class Thinking:
    """What is known of a model's thinking before it begins. Marks are token ids.

    gap     ids of newlines, of which one may stand between thinking and a held answer
    inside  the prompt has the opening mark
    budget  tokens between the marks, None: no limit
    answer  the grammar of what follows; "": free text
    """

    opens: tuple[int, ...]
    closes: tuple[int, ...]
    gap: tuple[int, ...]
    inside: bool
    budget: int | None
    answer: str

    def as_grammar(self) -> str:
        return f"{_PREFIX}{json.dumps(asdict(self))}}}"

    @classmethod
    def of(cls, grammar: str) -> Thinking | None:
        """None for any other grammar."""
        if not grammar.startswith(_PREFIX):
            return None
        values: dict[str, Any] = json.loads(grammar)["thinking"]
        marks: dict[str, Any] = {name: tuple(values.pop(name)) for name in ("opens", "closes", "gap")}
        return cls(**marks, **values)


class Walker:
    """What the engine walks along a request's tokens; see grammar/masks.py for that of a compiled grammar."""

    def copy(self) -> Walker:
        """Another request at the same place."""
        raise NotImplementedError

    def consume(self, ids: Sequence[int]) -> bool:
        """Move on by tokens that a mask allowed; False if they are not in the grammar."""
        raise NotImplementedError

    def mask(self) -> bytes:
        """Little-endian 32-bit words: bit t % 32 of word t // 32 allows token t."""
        raise NotImplementedError

    @property
    def error(self) -> str:
        """Why it cannot go on, or nothing."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The tokens a walker needs to know: how many, which end a text, and what each adds to it."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    text_of: Callable[[Sequence[int]], bytes]


class _Phase(Enum):
    OPEN = 0
    FREE = 1
    GAP = 2
    ANSWER = 3


class ThinkingWalker(Walker):
    """One request's. `answer`: the walker of what follows, None: free text."""

    def __init__(self, rules: Thinking, alphabet: Alphabet, answer: Walker | None) -> None:
        self._rules = rules
        self._alphabet = alphabet
        self._answer = answer
        self._closing = alphabet.text_of(rules.closes)
        self._opening = alphabet.text_of(rules.opens)
        self._forced: tuple[int, ...] = ()
        self._lead = b""
        self._tail = b""
        self._num_free = 0
        self._phase = _Phase.OPEN
        if rules.inside:
            self._enter_free()

    def copy(self) -> ThinkingWalker:
        other = ThinkingWalker(self._rules, self._alphabet, self._answer and self._answer.copy())
        other._forced, other._lead, other._tail = self._forced, self._lead, self._tail
        other._num_free, other._phase = self._num_free, self._phase
        return other

    def consume(self, ids: Sequence[int]) -> bool:
        return all(self._consume(token) for token in ids)

    def mask(self) -> bytes:
        if self._forced:
            return self._with(bytes(self._num_bytes), self._forced[:1])
        if self._phase is _Phase.FREE:
            return self._all(without=self._alphabet.eos_token_ids if self._answer is not None else ())
        if self._answer is None:
            return self._all()
        more = {_Phase.OPEN: self._rules.opens[:1], _Phase.GAP: self._rules.gap}.get(self._phase, ())
        return self._with(self._answer.mask(), more)

    @property
    def error(self) -> str:
        return self._answer.error if self._answer is not None else ""

    def _consume(self, token: int) -> bool:
        text = self._alphabet.text_of([token])
        if self._forced:
            if token != self._forced[0]:
                return False
            self._forced = self._forced[1:]
            if not self._forced and self._phase is _Phase.FREE:
                self._phase = _Phase.GAP
            elif not self._forced:
                self._enter_free()
            return True
        if self._phase is _Phase.OPEN:
            return self._consume_open(token, text)
        if self._phase is _Phase.FREE:
            self._consume_free(text)
            return True
        if self._phase is _Phase.GAP:
            self._phase = _Phase.ANSWER
            if token in self._rules.gap:
                return True
        return self._answer is None or self._answer.consume([token])

    def _consume_open(self, token: int, text: bytes) -> bool:
        """Before a held answer the first token decides; before free text, the first letters."""
        opens = self._rules.opens
        if self._answer is not None:
            if token != opens[0]:
                self._phase = _Phase.ANSWER
                return self._answer.consume([token])
            self._forced = opens[1:]
            if not self._forced:
                self._enter_free()
            return True
        self._lead += text
        begun = self._lead.lstrip()
        if begun.startswith(self._opening):
            self._enter_free()
        elif not self._opening.startswith(begun):
            self._phase = _Phase.ANSWER
        return True

    def _consume_free(self, text: bytes) -> None:
        self._num_free += 1
        self._tail = (self._tail + text)[-len(self._closing) - len(text) :]
        if self._closing in self._tail:
            self._phase = _Phase.GAP
        else:
            self._check_budget()

    def _enter_free(self) -> None:
        self._phase = _Phase.FREE
        self._check_budget()

    def _check_budget(self) -> None:
        budget = self._rules.budget
        if budget is not None and self._num_free >= budget:
            self._forced = self._rules.closes

    @property
    def _num_bytes(self) -> int:
        """Of a mask as llguidance makes them, with room for one token more: those of one step must be of one size."""
        return (self._alphabet.vocab_size // 32 + 1) * 4

    def _all(self, without: Sequence[int] = ()) -> bytes:
        mask = bytearray(b"\xff" * self._num_bytes)
        for token in without:
            mask[token >> 3] &= ~(1 << (token & 7))
        return bytes(mask)

    @staticmethod
    def _with(mask: bytes, ids: Sequence[int]) -> bytes:
        found = bytearray(mask)
        for token in ids:
            found[token >> 3] |= 1 << (token & 7)
        return bytes(found)
