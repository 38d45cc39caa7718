"""Thinking before an answer: where a grammar begins, and a budget that closes the thinking; also on a real model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.grammar.thinking import Alphabet, Thinking, ThinkingWalker, Walker
from steelyard.text.tokenizer import Tokenizer
from tests.grammar.test_engine_masks import JSON, engine_on, model, run, submit, tokenizer  # noqa: F401, fixtures

TEXTS = ["<end>", "<think>", "</think>", "\n", "a", "b", "</", "think", ">", "<"]
END, OPENS, CLOSES, NEWLINE, A, B = range(6)
ALPHABET = Alphabet(len(TEXTS), (END,), lambda ids: "".join(TEXTS[i] for i in ids).encode())
RULES = Thinking((OPENS,), (CLOSES,), (NEWLINE,), inside=True, budget=None, answer="x")


class Only(Walker):
    """A grammar of the token B and an end."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def copy(self) -> Only:
        return Only(self.at)

    def consume(self, ids: Sequence[int]) -> bool:
        right = all(token == (B, END)[min(self.at + i, 1)] for i, token in enumerate(ids))
        self.at += len(ids)
        return right

    def mask(self) -> bytes:
        return (1 << (B, END)[min(self.at, 1)]).to_bytes(4, "little")

    @property
    def error(self) -> str:
        return ""


def allowed(walker: Walker) -> set[int]:
    bits = int.from_bytes(walker.mask(), "little")
    return {token for token in range(len(TEXTS)) if bits >> token & 1}


def walked(rules: Thinking, ids: Sequence[int], answer: bool = True) -> ThinkingWalker:
    """The walker behind `ids`, each of which its mask allowed."""
    walker = ThinkingWalker(rules, ALPHABET, Only() if answer else None)
    for token in ids:
        assert token in allowed(walker), (token, allowed(walker))
        assert walker.consume([token])
    return walker


def test_rules_travel_as_the_text_of_a_grammar() -> None:
    assert Thinking.of(RULES.as_grammar()) == RULES
    assert Thinking.of(replace(RULES, budget=5).as_grammar()) == replace(RULES, budget=5)
    assert Thinking.of(JSON) is None


def test_thinking_is_free_and_does_not_end_the_text_before_a_held_answer() -> None:
    free = set(range(len(TEXTS))) - {END}
    assert allowed(walked(RULES, [A, B, OPENS, A])) == free
    assert allowed(walked(RULES, [A], answer=False)) == free | {END}


@pytest.mark.parametrize("closing", [[CLOSES], [6, 7, 8]], ids=["a token", "in pieces"])
@pytest.mark.parametrize("gap", [[], [NEWLINE]])
def test_the_grammar_begins_behind_the_closing_mark_and_one_newline(closing: list[int], gap: list[int]) -> None:
    walker = walked(RULES, [A, *closing])
    assert allowed(walker) == {B, NEWLINE}
    assert allowed(walked(RULES, [A, *closing, *gap, B])) == {END}
    assert not walker.copy().consume([A])
    assert walker.consume([B]), "the copy moved the original"


def test_without_an_opening_mark_the_first_token_decides() -> None:
    rules = replace(RULES, inside=False)
    assert allowed(walked(rules, [])) == {B, OPENS}
    assert allowed(walked(rules, [B])) == {END}
    assert allowed(walked(rules, [OPENS, A, CLOSES])) == {B, NEWLINE}
    pieces = replace(rules, opens=(9, 7, 8))
    assert allowed(walked(pieces, [9])) == {7}
    assert allowed(walked(pieces, [9, 7, 8, A, CLOSES, B])) == {END}


@pytest.mark.parametrize("closes", [(CLOSES,), (6, 7, 8)])
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_closes_the_thinking(budget: int, closes: tuple[int, ...]) -> None:
    rules = replace(RULES, budget=budget, closes=closes)
    for answer in (True, False):
        walker = walked(rules, [A] * budget, answer)
        for token in closes:
            assert allowed(walker) == {token}
            assert not walker.copy().consume([A])
            assert walker.consume([token])
        assert allowed(walker) == ({B, NEWLINE} if answer else set(range(len(TEXTS))))
    early = walked(replace(rules, budget=3), [A, CLOSES, A, A, A, A], answer=False)
    assert allowed(early) == set(range(len(TEXTS))), "what was closed in time is not closed again"
    opened = replace(rules, inside=False)
    assert allowed(walked(opened, [A] * 9, answer=False)) == set(range(len(TEXTS))), "there was no thinking"
    assert allowed(walked(opened, [NEWLINE, OPENS, *[A] * budget], answer=False)) == {closes[0]}


def test_a_real_model_thinks_within_its_budget_and_then_keeps_to_its_schema(
    model: Path,  # noqa: F811
    tokenizer: Tokenizer,  # noqa: F811
) -> None:
    ids = {text: tuple(tokenizer.encode(text, False)) for text in ("<think>", "</think>", "\n")}
    rules = Thinking(ids["<think>"], ids["</think>"], ids["\n"], inside=True, budget=20, answer=JSON)
    engine = engine_on(model, tokenizer)
    found = run(engine, submit("thinks", rules.as_grammar(), n=3), submit("json", JSON))
    for index in range(3):
        thought, _, answer = tokenizer.decode(found[("thinks", index)]).partition("</think>")
        assert len(found[("thinks", index)]) > 20 and thought
        assert set(json.loads(answer)) == {"name", "size"}
    assert len({tuple(found[("thinks", index)]) for index in range(3)}) == 3
