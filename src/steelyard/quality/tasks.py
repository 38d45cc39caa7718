"""Small tasks with checkable answers, made from a seed: arithmetic, far facts, several turns, JSON. No model."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["arithmetic", "fact", "turns", "json"]
KINDS: tuple[Kind, ...] = ("arithmetic", "fact", "turns", "json")
ENOUGH_TASKS = 96
"""Asked where nobody says how many: with as many, the share that is right is known to some 10 points."""
_NAMES = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "Jan",
    "Kim",
    "Lea",
    "Max",
    "Nina",
    "Otto",
    "Pia",
]
_THINGS = ["lamp", "boat", "drum", "coat", "book", "ring", "bell", "cup", "key", "kite"]
_COLOURS = ["red", "blue", "green", "black", "white", "yellow"]


@dataclass(frozen=True, slots=True)
class Task:
    """A text to go on with and how its answer must begin. `far_words`: how far the fact is from its question."""

    kind: Kind
    prompt: str
    expected: str
    far_words: int = 0
    max_tokens: int = 12

    def right(self, answer: str) -> bool:
        """Whether an answer is right: for JSON by its value, else by its first words."""
        if self.kind == "json":
            try:
                value, _ = json.JSONDecoder().raw_decode(self.prompt[self.prompt.rindex("{") :] + answer)
            except ValueError:
                return False
            return bool(value == json.loads(self.expected))
        return answer.strip().lower().startswith(self.expected.lower())


def make_tasks(count: int, seed: int = 0, far_words: tuple[int, ...] = (0, 50, 300)) -> list[Task]:
    """`count` tasks, kinds in turn. Facts stand up to `far_words` words before their question: a cut context shows."""
    draw = random.Random(f"tasks {seed}")
    makers = {"arithmetic": _arithmetic, "fact": _fact, "turns": _turns, "json": _json}
    return [makers[KINDS[i % len(KINDS)]](draw, far_words[i // len(KINDS) % len(far_words)]) for i in range(count)]


def _arithmetic(draw: random.Random, far: int) -> Task:
    shown = [(draw.randint(2, 9), draw.randint(2, 9)) for _ in range(4)]
    text = "".join(f"{a} + {b} = {a + b}\n" for a, b in shown[:-1])
    a, b = shown[-1]
    return Task("arithmetic", f"{text}{a} + {b} =", str(a + b), max_tokens=4)


def _fact(draw: random.Random, far: int) -> Task:
    name, colour, thing = draw.choice(_NAMES), draw.choice(_COLOURS), draw.choice(_THINGS)
    text = f"The {thing} of {name} is {colour}. {_filler(draw, far)}Question: which colour is the {thing} of {name}?"
    return Task("fact", f"{text} Answer: the {thing} of {name} is", colour, far, max_tokens=4)


def _turns(draw: random.Random, far: int) -> Task:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    text = f"User: My name is {name}.\nBot: Hello {name}.\nUser: I lost my {thing}.\nBot: I am sorry.\n"
    question = "\nUser: What is my name?\nBot: Your name is"
    return Task("turns", text + _filler(draw, far) + question, name, far, max_tokens=4)


def _json(draw: random.Random, far: int) -> Task:
    rows = [(draw.choice(_NAMES), draw.randint(20, 60)) for _ in range(3)]
    lines = [f"{n} is {a}: " + json.dumps({"name": n, "age": a}) for n, a in rows[:-1]]
    name, age = rows[-1]
    prompt = "\n".join([*lines, f'{name} is {age}: {{"name":'])
    return Task("json", prompt, json.dumps({"name": name, "age": age}), 0, 16)


def _filler(draw: random.Random, words: int) -> str:
    """Sentences that name nothing a question asks for."""
    said = [
        "the",
        "weather",
        "was",
        "mild",
        "and",
        "people",
        "walked",
        "along",
        "the",
        "river",
        "before",
        "the",
        "market",
        "opened",
        "again",
    ]
    return "".join(" ".join(draw.sample(said, 10)).capitalize() + ". " for _ in range(words // 10))
