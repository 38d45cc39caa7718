"""Grammars a client may send: what can be enforced passes, what cannot is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.errors import InvalidRequest
from steelyard.grammar import source
from steelyard.grammar.source import GrammarChecker

CHECKER = GrammarChecker()
DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(500):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    "grammar",
    [
        source.from_json_schema({"type": "object"}),
        source.from_json_schema({"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}),
        source.from_json_schema({"type": "string", "maxLength": 1_000_000}),
        source.from_regex(r"[a-z]+@[a-z]+\.(com|org)"),
        source.from_regex("(a{1,1000}b?){1,1000}"),
        source.from_choice(["yes", "no", 'with "quotes"\n']),
        source.from_lark('start: "a" start | "b"'),
    ],
)
def test_what_can_be_enforced_passes(grammar: str) -> None:
    CHECKER.check(grammar, "x")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (source.from_json_schema({"type": "strin"}), "strin"),
        (source.from_json_schema({"$ref": "#/$defs/missing"}), "missing"),
        (source.from_json_schema({"$ref": "https://example.org/a.json"}), "example.org"),
        (source.from_json_schema({"$ref": "#"}), ""),
        (source.from_json_schema({"type": "integer", "minimum": 5, "maximum": 4}), "Unsatisfiable"),
        (source.from_json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (source.from_regex("(?=a)b"), "look-around"),
        (source.from_regex("(a"), ""),
        (source.from_lark("start: nothing"), "nothing"),
        (source.from_lark("%%%"), ""),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(grammar: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^x: cannot be enforced") as caught:
        CHECKER.check(grammar, "x")
    assert said in caught.value.message
    assert (caught.value.param, caught.value.code) == ("x", "invalid_grammar")
    assert len(caught.value.message) < 700


def test_a_grammar_too_long_or_without_a_text_is_refused_unread() -> None:
    for make in (
        lambda: source.from_regex("a" * 70_000),
        lambda: source.from_json_schema({"enum": ["x" * 10] * 10_000}),
        lambda: source.from_json_schema(False),
        lambda: source.from_json_schema(DEEP),
        lambda: source.from_choice([]),
        lambda: source.from_choice([""]),
        lambda: source.from_regex("\ud800"),
    ):
        with pytest.raises(InvalidRequest):
            CHECKER.check(make(), "x")
