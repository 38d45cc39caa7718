"""The gate with arms whose harm is known: noise passes, a context cut to 128 words and drifting scores do not."""

from __future__ import annotations

import asyncio
import hashlib
import math
from dataclasses import dataclass, replace

import pytest

from steelyard.quality.ask import Asked, apart, ask
from steelyard.quality.compare import Answer, Scored, distance, mcnemar, top_kl
from steelyard.quality.gate import judge
from steelyard.quality.tasks import KINDS, make_tasks

TASKS = make_tasks(240)


def luck(*what: object) -> float:
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big") / 2**32


@dataclass(frozen=True)
class FakeArm:
    """Knows the answer to `skill` of the tasks whose fact lies in its last `window` words; `noise` moves its scores."""

    skill: float = 0.7
    window: int = 10**6
    noise: float = 0.0
    worse: float = 0.0
    longer: int = 0
    salt: str = ""

    async def answer(self, text: str, max_tokens: int) -> Answer:
        (task,) = {t.prompt: t for t in TASKS if t.prompt == text}.values()
        known = task.far_words < self.window and luck(text) < self.skill
        said = task.expected if known else " unknown"
        if task.kind == "json" and known:
            said = ' "' + task.expected.split(': "', 1)[1]
        return Answer(said, 4 + self.longer)

    async def score(self, text: str) -> Scored:
        words = text.split()
        values: list[float | None] = [None]
        for i in range(1, len(words)):
            far = i > self.window
            values.append(-1.0 - self.worse - 2.0 * far + self.noise * (luck(self.salt, text, i) - 0.5))
        top = tuple({"a": v, "b": v - 1.0} if v is not None else {} for v in values)
        return Scored(tuple(words), tuple(values), top)


def asked(arm: FakeArm) -> Asked:
    return asyncio.run(ask(arm, TASKS, 4))


BASE = asked(FakeArm(noise=0.01))
NOISE = apart(BASE, asked(FakeArm(noise=0.01, salt="another batch size")))


def test_the_same_configuration_is_inside_its_own_noise() -> None:
    again = apart(BASE, asked(FakeArm(noise=0.01, salt="third")))
    verdict = judge(again, NOISE)
    assert verdict.passed, verdict.reasons


def test_a_planted_window_of_128_fails() -> None:
    harmed = apart(BASE, asked(FakeArm(noise=0.01, window=128)))
    verdict = judge(harmed, NOISE)
    assert verdict.outcome == "fail"
    assert any("perplexity" in r and "from position 128" in r for r in verdict.reasons)
    assert harmed.mcnemar_p < 0.05 and harmed.only_a > 0 == harmed.only_b


def test_harm_that_only_the_far_bucket_shows_does_not_hide_in_the_average() -> None:
    harmed = apart(BASE, asked(FakeArm(noise=0.01, window=128)))
    near, far = harmed.buckets[0], harmed.buckets[1]
    assert (near.start, far.start) == (0, 128)
    assert abs(math.log(near.ratio)) < 0.01 and far.ratio > 2


@pytest.mark.parametrize("skill", [0.05, 1.0])
def test_a_base_that_cannot_show_harm_does_not_count(skill: float) -> None:
    base = asked(FakeArm(skill=skill))
    assert judge(apart(base, base), NOISE).outcome == "does not count"


def test_longer_answers_void_a_claim_of_speed() -> None:
    verdict = judge(apart(BASE, asked(FakeArm(noise=0.01, longer=1))), NOISE)
    assert verdict.outcome == "fail" and any("as long" in r for r in verdict.reasons)


def test_slightly_worse_scores_everywhere_are_stated() -> None:
    verdict = judge(apart(BASE, asked(FakeArm(noise=0.01, worse=0.02))), NOISE)
    assert verdict.outcome == "fail" and "perplexity +2" in verdict.reasons[0]


def test_mcnemar_is_exact_and_counts_pairs_that_differ() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(10, 0) == pytest.approx(2 / 2**10)
    assert mcnemar(6, 5) == 1.0


def test_kl_is_zero_for_the_same_and_grows() -> None:
    a = {"x": math.log(0.7), "y": math.log(0.2)}
    b = {"x": math.log(0.5), "y": math.log(0.4)}
    assert top_kl(a, a) == pytest.approx(0.0, abs=1e-9)
    assert top_kl(a, b) == pytest.approx(0.7 * math.log(1.4) + 0.2 * math.log(0.5), abs=1e-9)
    assert top_kl(a, {"z": math.log(0.9)}) > 0.5


def test_answers_that_part_are_located() -> None:
    pairs = [(Answer("abcd", 4), Answer("abXd", 4)), (Answer("same", 4), Answer("same", 4))]
    found = distance([], pairs, [])
    assert (found.first_divergence, found.same_answers, found.length_ratio) == (2.0, 0.5, 1.0)
    with pytest.raises(AssertionError, match="same tokens"):
        distance([(Scored(("a",), (None,)), Scored(("b",), (None,)))], [], [])


def test_tasks_are_the_same_for_a_seed_of_every_kind_and_checkable() -> None:
    assert make_tasks(12) == make_tasks(12) != make_tasks(12, seed=1)
    assert {t.kind for t in TASKS} == set(KINDS) and {t.far_words for t in TASKS} >= {0, 50, 300}
    for task in TASKS[:24]:
        if task.kind != "json":
            assert task.right(f" {task.expected}, of course") and not task.right("no")
    task = next(t for t in TASKS if t.kind == "json")
    rest = ' "' + task.expected.split(': "', 1)[1]
    assert task.right(rest + "\nmore") and not task.right(rest[:-1]) and not replace(task, expected="{}").right(rest)
