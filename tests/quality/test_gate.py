"""The gate with arms whose harm is known: noise passes, a context cut to 128 words and drifting scores do not.

Every figure is shown beside its limit, in text and in JSON, whatever the verdict.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from dataclasses import dataclass, replace

import pytest

from steelyard.cli import quality
from steelyard.cli.main import main
from steelyard.core.verdict import Held, Verdict
from steelyard.quality.ask import Asked, apart, ask
from steelyard.quality.compare import Answer, Scored, distance, mcnemar, top_kl
from steelyard.quality.gate import FEWEST_SOLVED, P_LIMIT, judge
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


def by_name(verdict: Verdict, name: str) -> Held:
    return {f.name: f for f in verdict.figures}[name]


BASE = asked(FakeArm(noise=0.01))
NOISE = apart(BASE, asked(FakeArm(noise=0.01, salt="another batch size")))


def test_the_same_configuration_is_inside_its_own_noise() -> None:
    again = apart(BASE, asked(FakeArm(noise=0.01, salt="third")))
    verdict = judge(again, NOISE)
    assert verdict.passed and {f.outcome for f in verdict.figures} == {"pass"}, verdict.summary
    assert verdict.summary == "pass: all 6 figures are inside their limits"


def test_a_planted_window_of_128_fails() -> None:
    harmed = apart(BASE, asked(FakeArm(noise=0.01, window=128)))
    verdict = judge(harmed, NOISE)
    assert verdict.outcome == "fail"
    assert by_name(verdict, "perplexity, positions 0 to 127").outcome == "pass"
    assert "perplexity, positions 128 on +" in verdict.summary and "0 to 127" not in verdict.summary
    assert harmed.mcnemar_p < 0.05 and harmed.only_a > 0 == harmed.only_b


def test_harm_that_only_the_far_bucket_shows_does_not_hide_in_the_average() -> None:
    harmed = apart(BASE, asked(FakeArm(noise=0.01, window=128)))
    near, far = harmed.buckets[0], harmed.buckets[1]
    assert (near.start, far.start) == (0, 128)
    assert near.ratio is not None and far.ratio is not None
    assert abs(math.log(near.ratio)) < 0.01 and far.ratio > 2


@pytest.mark.parametrize(("skill", "what_to_do"), [(0.05, "a model that solves more"), (1.0, "a smaller model")])
def test_a_base_that_cannot_show_harm_voids_the_tasks_alone_and_says_what_to_do(skill: float, what_to_do: str) -> None:
    base = asked(FakeArm(skill=skill))
    verdict = judge(apart(base, base), NOISE)
    void = [f.name.split()[0] for f in verdict.figures if f.outcome == "does not count"]
    assert verdict.outcome == "does not count" and void == ["tasks"] and len(verdict.figures) == 6
    assert "harm shows only from 30% to 90%" in verdict.summary and what_to_do in verdict.summary
    worse = judge(apart(base, asked(FakeArm(skill=skill, worse=0.02))), NOISE)
    assert worse.outcome == "fail" and "perplexity" in worse.summary and what_to_do in worse.summary


def test_so_few_tasks_that_losing_all_is_chance_do_not_count() -> None:
    few = Asked(BASE.scored, BASE.answers, (True,) * (FEWEST_SOLVED - 1) + (False,) * 4)
    lost = replace(few, right=(False,) * len(few.right))
    assert apart(few, lost).mcnemar_p >= P_LIMIT
    verdict = judge(apart(few, lost), NOISE)
    assert verdict.outcome == "does not count" and "fewer than 6 lost may be chance: ask more" in verdict.summary
    more = replace(few, right=(True, *few.right))
    assert judge(apart(more, replace(more, right=(False,) * len(more.right))), NOISE).outcome == "fail"


def test_a_figure_that_no_server_gave_is_no_pass() -> None:
    blind = tuple(replace(s, top=()) for s in BASE.scored)
    verdict = judge(apart(replace(BASE, scored=blind), replace(BASE, scored=blind)), NOISE)
    void = [f.name for f in verdict.figures if f.outcome == "does not count"]
    assert verdict.outcome == "does not count" and void == ["top-1 agreement", "KL on the top tokens"]
    nothing = judge(distance([], [], []), distance([], [], []))
    assert {f.outcome for f in nothing.figures} == {"does not count"} and len(nothing.figures) == 5


@pytest.mark.parametrize("outcome", ["pass", "fail"])
def test_limits_are_those_that_were_held_against_the_figures(outcome: str) -> None:
    inside, past = (0.0, 1e-6) if outcome == "fail" else (1e-6, 0.0)
    step = past - inside
    found = replace(
        apart(BASE, BASE),
        buckets=tuple(replace(b, ratio=1.0071 + step) for b in NOISE.buckets),
        top1_agreement=0.97 - 0.02 - step, kl=0.05 + step, length_ratio=1.02 + step, only_a=9, only_b=1,
        mcnemar_p=0.05 - step,
    )  # fmt: skip
    verdict = judge(found, replace(NOISE, top1_agreement=0.97, kl=0.005))
    assert [f.outcome for f in verdict.figures] == [outcome] * 6, verdict
    shown = {
        "pass": ["at least 95.00%", "at most 0.05", "at least 0.05", "0.980 to 1.020"],
        "fail": ["at least 95.0000%", "at most 0.05", "at least 0.05", "0.980000 to 1.020000"],
    }
    assert [f.limit for f in verdict.figures[2:]] == shown[outcome]
    for figure in verdict.figures:
        assert outcome == "pass" or figure.cells[1] not in figure.limit, "the digits tell what missed its limit"


def test_the_command_prints_every_figure_with_its_limit_and_json_has_them_as_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harmed = apart(BASE, asked(FakeArm(noise=0.01, window=128)))
    verdict = judge(harmed, NOISE)

    async def judged(*given: object, **options: object) -> object:
        return verdict, harmed, NOISE

    monkeypatch.setattr(quality, "judge_servers", judged)
    command = ["quality", "--base", "http://127.0.0.1:1", "--arm", "http://127.0.0.1:2"]
    assert main(command) == 1
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first == verdict.summary and header.split()[:3] == ["figure", "arm", "limit"]
    assert [row.split("  ")[1].strip() for row in rows] == [f.name for f in verdict.figures]
    assert rows[1].endswith("fail") and "at most +0.71%" in rows[1] and rows[0].endswith("pass")
    assert main([*command, "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)["verdict"]
    assert shown["outcome"] == "fail" and shown["figures"][1]["high"] == pytest.approx(0.0071)
    assert [f["outcome"] for f in shown["figures"]] == [f.outcome for f in verdict.figures]


def test_longer_answers_void_a_claim_of_speed() -> None:
    verdict = judge(apart(BASE, asked(FakeArm(noise=0.01, longer=1))), NOISE)
    assert verdict.outcome == "fail" and "length of answers 1.250, 0.980 to 1.020" in verdict.summary


def test_slightly_worse_scores_everywhere_are_stated() -> None:
    verdict = judge(apart(BASE, asked(FakeArm(noise=0.01, worse=0.02))), NOISE)
    assert verdict.outcome == "fail" and "perplexity, positions 0 to 127 +2" in verdict.summary


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


def test_tasks_are_the_same_for_a_seed_of_every_kind_and_checkable() -> None:
    assert make_tasks(12) == make_tasks(12) != make_tasks(12, seed=1)
    assert {t.kind for t in TASKS} == set(KINDS) and {t.far_words for t in TASKS} >= {0, 50, 300}
    for task in TASKS[:24]:
        if task.kind != "json":
            assert task.right(f" {task.expected}, of course") and not task.right("no")
    task = next(t for t in TASKS if t.kind == "json")
    rest = ' "' + task.expected.split(': "', 1)[1]
    assert task.right(rest + "\nmore") and not task.right(rest[:-1]) and not replace(task, expected="{}").right(rest)
