"""Asks one arm everything the gate needs, at a given number of requests at a time. Transport is handed in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from steelyard.quality.compare import Answer, Distance, Scored, distance
from steelyard.quality.tasks import Task


class Arm(Protocol):
    """A model behind some interface, greedy."""

    async def score(self, text: str) -> Scored:
        """Every token of the text with its log probability and the top tokens at its place."""
        ...

    async def answer(self, text: str, max_tokens: int) -> Answer: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """All of one arm's answers, in order of the tasks."""

    scored: tuple[Scored, ...]
    answers: tuple[Answer, ...]
    right: tuple[bool, ...]


async def ask(arm: Arm, tasks: Sequence[Task], at_once: int) -> Asked:
    """Score every task's prompt with its right answer, and let the arm answer; `at_once` sets the batch size."""
    room = asyncio.Semaphore(at_once)

    async def one(task: Task) -> tuple[Scored, Answer]:
        async with room:
            said = await arm.answer(task.prompt, task.max_tokens)
            return await arm.score(f"{task.prompt} {task.expected}"), said

    found = await asyncio.gather(*(one(task) for task in tasks))
    right = tuple(task.right(said.text) for task, (_, said) in zip(tasks, found, strict=True))
    return Asked(tuple(s for s, _ in found), tuple(a for _, a in found), right)


def apart(a: Asked, b: Asked) -> Distance:
    """How far B is from A."""
    pairs = list(zip(a.scored, b.scored, strict=True))
    answers, right = zip(a.answers, b.answers, strict=True), zip(a.right, b.right, strict=True)
    return distance(pairs, list(answers), list(right))
