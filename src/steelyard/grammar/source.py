"""What a client asks the output to be, as one grammar in llguidance's own JSON, and a check that it can be enforced.

    JSON schema | JSON object | regex | choice | Lark --text--> check --> engine

A grammar that cannot be enforced is refused here, with the library's own words; none is ever weakened in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from steelyard.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 64 * 2**10
_MAX_MESSAGE_CHARS = 600
_JSON_STYLE = {"whitespace_pattern": r"[ \t\n]{0,32}"}
"""A model that can write white space for ever does so, sooner or later."""


def from_json_schema(schema: Any) -> str:
    """Documents of a JSON schema. Raises InvalidRequest if it is no object, or too long."""
    if not isinstance(schema, dict):
        raise InvalidRequest("the schema must be a JSON object", code="invalid_grammar")
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise InvalidRequest("the schema is nested too deeply", code="invalid_grammar") from None
    return _guarded(lambda: LLMatcher.grammar_from_json_schema(_bounded(text), defaults=_JSON_STYLE))


def from_regex(pattern: str) -> str:
    """Texts that match the whole pattern, in the dialect of Rust's regex (no look-around, no back-references)."""
    return _guarded(lambda: LLMatcher.grammar_from_regex(_bounded(pattern)))


def from_choice(choices: Sequence[str]) -> str:
    """One of some texts, as it stands."""
    if not choices or not all(choices):
        raise InvalidRequest("choice: must be texts with at least one character each", code="invalid_grammar")
    return from_lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def from_lark(text: str) -> str:
    """A grammar in llguidance's dialect of Lark, which begins at `start`."""
    return _guarded(lambda: LLMatcher.grammar_from_lark(_bounded(text)))


def kinds_given(asked: Any) -> list[tuple[str, Any]]:
    """(kind, value) of each field that is given of a StructuredOutputs, the client's or core's."""
    fields = ((kind, getattr(asked, kind)) for kind in _MAKERS)
    return [(kind, value) for kind, value in fields if value is not None and value is not False]


def from_kind(kind: str, value: Any) -> str:
    """The grammar of one of them. Raises InvalidRequest as the functions above do."""
    return _MAKERS[kind](value)


_MAKERS: dict[str, Callable[[Any], str]] = {
    "json": lambda schema: from_json_schema(dict(schema)),
    "json_object": lambda _: from_json_schema({"type": "object"}),
    "regex": from_regex,
    "choice": from_choice,
    "grammar": from_lark,
}


class GrammarChecker:
    """Checks grammars over the alphabet of single bytes, so that no vocabulary is needed. Any thread may call it."""

    def __init__(self) -> None:
        self._bytes = LLTokenizer(TokenizerWrapper(_Bytes()))

    def check(self, grammar: str, param: str) -> None:
        """Raises InvalidRequest, naming `param`, for a grammar that is wrong, unenforceable, or has no text at all."""
        why = LLMatcher.validate_grammar(grammar, self._bytes)
        if not why:
            matcher = LLMatcher(self._bytes, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # what refers to itself for ever shows here first
            if matcher.is_error():
                why = matcher.get_error().splitlines()[0]
        if why:
            message = f"{param}: cannot be enforced: {why[:_MAX_MESSAGE_CHARS].strip()}"
            raise InvalidRequest(message, param=param, code="invalid_grammar")


class _Bytes:
    """A vocabulary of the 256 bytes and an end, as llguidance wants one."""

    eos_token_id = 256
    bos_token_id = None
    tokens = tuple(bytes([byte]) for byte in range(256)) + (b"<end>",)
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _bounded(text: str) -> str:
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the grammar has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are compiled", code="invalid_grammar"
        )
    return text


def _guarded(make: Any) -> str:
    try:
        return str(make())
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidRequest(f"the grammar cannot be read: {error}", code="invalid_grammar") from None
