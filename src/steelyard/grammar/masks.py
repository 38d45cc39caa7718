"""A compiled grammar walked along one request's tokens: which token may come next, as a bit mask.

    Vocabulary + grammar --compile--> Walker --copy, one a choice--> consume(ids) ... mask()

llguidance never raises: it falls into an error state, which is looked for after every call.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from steelyard.errors import InvalidRequest
from steelyard.grammar.thinking import Alphabet, Thinking, ThinkingWalker, Walker


class Vocabulary:
    """A model's tokens as grammars see them. Making one takes half a second; compiling with it, milliseconds.

    tokenizer_json  the text of a tokenizer.json
    vocab_size      of the model's logits: ids beyond the tokenizer's are never allowed
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokens = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        self._alphabet = Alphabet(
            vocab_size, tuple(eos_token_ids), lambda ids: bytes(self._tokens.decode_bytes(list(ids)))
        )

    def compile(self, grammar: str) -> Walker:
        """Raises InvalidRequest for a grammar that cannot be enforced over this vocabulary."""
        rules = Thinking.of(grammar)
        if rules is not None:
            return ThinkingWalker(rules, self._alphabet, self.compile(rules.answer) if rules.answer else None)
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        walker = GrammarWalker(matcher)
        if not matcher.is_error():
            walker.mask()
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be enforced: {walker.error}", code="invalid_grammar")
        return walker


class GrammarWalker(Walker):
    """Where one request's output stands in its grammar. At the grammar's end its mask allows an end token only."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> GrammarWalker:
        return GrammarWalker(self._matcher.deep_copy())

    def consume(self, ids: Sequence[int]) -> bool:
        return bool(self._matcher.consume_tokens(list(ids))) and not self._matcher.is_error()

    def mask(self) -> bytes:
        return bytes(self._matcher.compute_bitmask())

    @property
    def error(self) -> str:
        return str(self._matcher.get_error()).splitlines()[0] if self._matcher.is_error() else ""
