"""The gate where a server gives a part of the figures, none, or what are none: never a pass, never a traceback.

And harm that is seen fails whatever the base solves.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from steelyard.cli.main import main
from steelyard.quality.ask import Asked, apart
from steelyard.quality.compare import Scored
from steelyard.quality.gate import judge
from steelyard.quality.tasks import ENOUGH_TASKS
from tests.quality.test_gate import BASE, NOISE, FakeArm, asked, by_name

Json = dict[str, Any]
GIVEN: dict[str, Callable[[int, Scored], Scored]] = {
    "null after 3 tokens": lambda i, s: replace(s, logprobs=s.logprobs[:4] + (None,) * (len(s.logprobs) - 4)),
    "null after 128": lambda i, s: replace(s, logprobs=s.logprobs[:128] + (None,) * (len(s.logprobs) - 128)),
    "3 of each list": lambda i, s: Scored(s.tokens, s.logprobs[:3], s.top[:3]),
    "3 tokens": lambda i, s: Scored(s.tokens[:3], s.logprobs[:3], s.top[:3]),
    "1 text": lambda i, s: s if i == 0 else Scored(s.tokens, ()),
    "1 text listed": lambda i, s: s if i == 0 else Scored((), ()),
    "all but 1 token": lambda i, s: s if i else replace(s, logprobs=(*s.logprobs[:-1], None)),
    "all but 1 list of the best": lambda i, s: s if i else replace(s, top=(*s.top[:-1], {})),
    "not numbers": lambda i, s: replace(s, logprobs=(math.nan,) * len(s.logprobs)),
    "best that are not numbers": lambda i, s: replace(s, top=({"a": math.nan},) * len(s.top)),
    "probabilities above 1": lambda i, s: replace(s, logprobs=(1.0,) * len(s.logprobs)),
    "other tokens": lambda i, s: replace(s, tokens=tuple(f"_{t}" for t in s.tokens)),
}


def giving(what: str, asked: Asked = BASE) -> Asked:
    return replace(asked, scored=tuple(GIVEN[what](i, s) for i, s in enumerate(asked.scored)))


@pytest.mark.parametrize("what", GIVEN)
def test_an_arm_that_gives_a_part_of_the_figures_does_not_count(what: str) -> None:
    verdict = judge(apart(BASE, giving(what)), NOISE)
    assert verdict.outcome == "does not count", verdict.summary
    assert "; judge a server " in verdict.summary, "says what to do"
    assert {b.start for b in NOISE.buckets} == {b.start for b in apart(BASE, giving(what)).buckets}
    assert [f.name.split()[0] for f in verdict.figures][-2:] == ["tasks", "length"] and len(verdict.figures) == 6


@pytest.mark.parametrize("what", GIVEN)
def test_a_noise_floor_of_a_part_of_the_positions_does_not_count(what: str) -> None:
    verdict = judge(apart(BASE, BASE), apart(BASE, giving(what)))
    assert verdict.outcome == "does not count", verdict.summary
    assert "the base, asked twice," in verdict.summary


def test_the_words_tell_how_many_positions_were_judged_of_how_many() -> None:
    verdict = judge(apart(BASE, giving("null after 128")), NOISE)
    near, far = (by_name(verdict, f"perplexity, positions {where}") for where in ("0 to 127", "128 on"))
    assert near.outcome == "pass" and far.outcome == "does not count" and far.value is None
    assert by_name(verdict, "top-1 agreement").outcome == "pass", "what it gave is judged"
    verdict = judge(apart(BASE, giving("null after 3 tokens")), NOISE)
    of = sum(min(len(s.tokens), 128) - 1 for s in BASE.scored)
    assert f"of {of} positions arm and base gave log probabilities at {3 * 240}; judge" in verdict.summary
    other = judge(apart(BASE, giving("other tokens")), NOISE)
    assert "arm and base: other tokens in 240 texts; judge a server with the base's tokenizer" in other.summary


def test_harm_that_is_seen_in_a_part_of_the_positions_fails() -> None:
    harmed = asked(FakeArm(noise=0.01, worse=0.05))
    verdict = judge(apart(BASE, giving("null after 3 tokens", harmed)), NOISE)
    assert verdict.outcome == "fail" and by_name(verdict, "perplexity, positions 0 to 127").outcome == "fail"
    lost = replace(giving("1 text listed"), right=(False,) * 240)
    assert judge(apart(BASE, lost), NOISE).outcome == "fail"


def test_fillers_beyond_any_float_fail_and_are_numbers_in_json() -> None:
    filled = replace(
        BASE, scored=tuple(replace(s, logprobs=(None, *(-9999.0 for _ in s.logprobs[1:]))) for s in BASE.scored)
    )
    found = apart(BASE, filled)
    verdict = judge(found, NOISE)
    assert verdict.outcome == "fail" and [b.ratio for b in found.buckets] == [pytest.approx(math.exp(20))] * 2
    assert all(b.perplexity_b is not None and math.isfinite(b.perplexity_b) for b in found.buckets)


@pytest.mark.parametrize("num_right", [96, 88, 28, 6])
def test_planted_harm_fails_whatever_the_base_solves_and_a_pass_is_void_outside_the_range(num_right: int) -> None:
    right = (True,) * num_right + (False,) * (96 - num_right)
    base = replace(BASE, right=right)
    verdict = judge(apart(base, replace(base, right=(False,) * 96)), NOISE)
    assert verdict.outcome == "fail", verdict.summary
    assert f"-> 0%, {num_right} lost, 0 won: p " in verdict.summary and "harm shows only" not in verdict.summary
    assert judge(apart(base, base), NOISE).outcome == "does not count"


@pytest.mark.parametrize(("num_tasks", "more"), [(12, True), (ENOUGH_TASKS, False)])
def test_few_tasks_are_told_to_be_more_before_another_model_is_advised(num_tasks: int, more: bool) -> None:
    for solved, model in ((11 / 12, "a smaller model"), (1 / 12, "a model that solves more")):
        right = tuple(i < solved * num_tasks for i in range(num_tasks))
        base = replace(BASE, right=right)
        said = judge(apart(base, base), NOISE).summary
        assert model in said and ("ask more tasks, 96 of them; if that is no help, compare" in said) == more


def test_a_p_that_rounds_to_its_limit_is_shown_with_the_digits_that_tell() -> None:
    base = replace(BASE, right=(True,) * 42 + (False,) * 25 + (True,) * 40)
    arm = replace(base, right=(False,) * 42 + (True,) * 25 + (True,) * 40)
    found = apart(base, arm)
    assert (found.only_a, found.only_b) == (42, 25) and 0.0495 < found.mcnemar_p < 0.05
    verdict = judge(found, NOISE)
    assert verdict.outcome == "fail" and f"p {found.mcnemar_p:.3g}, at least 0.05" in verdict.summary


def _logprobs(mode: str, tokens: list[str]) -> Any:
    n = len(tokens) - 1
    best: list[Any] = [None] + [{"a": -1.0}] * n
    whole = {"tokens": tokens, "token_logprobs": [None] + [-1.0] * n, "top_logprobs": best}
    cut = [None] + [-1.0] * 3 + [None] * (n - 3)
    return {
        "whole": whole,
        "null": None,
        "no best": {**whole, "top_logprobs": None},
        "no lists": {"tokens": None, "token_logprobs": None},
        "other tokens": {**whole, "tokens": [f"_{t}" for t in tokens]},
        "NaN": {**whole, "token_logprobs": [math.nan] * (n + 1), "top_logprobs": [{"a": math.nan}] * (n + 1)},
        "cut": {**whole, "token_logprobs": cut, "top_logprobs": best[:4] + [None] * (n - 3)},
        "fillers": {**whole, "token_logprobs": [None] + [-9999.0] * n},
    }[mode]


@contextmanager
def foreign(mode: str, **changes: Any) -> Iterator[str]:
    """A server that answers everything the same, and scores as `mode` says."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *what: object) -> None:
            pass

        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": "m", "object": "model"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            logprobs = _logprobs(mode, [*asked["prompt"].split(), "x"]) if asked.get("echo") else None
            choice = {"text": " no", "index": 0, "logprobs": logprobs, "finish_reason": "length"}
            self._send({"choices": [choice], "usage": {"completion_tokens": 4}, **changes})

        def _send(self, value: Json) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, *what: object) -> None:
            """A client that has heard enough hangs up."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _json(text: str) -> Any:
    def no_json(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=no_json)


@pytest.mark.parametrize(
    ("mode", "outcome", "says"),
    [
        ("null", "does not count", "gave log probabilities at 0; judge a server that gives them for every token"),
        ("no best", "does not count", "KL on the top tokens: of "),
        ("no lists", "does not count", "gave log probabilities at 0; judge a server"),
        ("other tokens", "does not count", "arm and base: other tokens in 12 texts"),
        ("NaN", "does not count", "gave log probabilities at 0; judge a server"),
        ("cut", "does not count", "arm and base gave log probabilities at"),
        ("fillers", "fail", "perplexity, positions 0 to 127 +"),
    ],
)
def test_a_foreign_server_is_judged_without_a_traceback(
    mode: str, outcome: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with foreign("whole") as base, foreign(mode) as arm:
        command = ["quality", "--base", base, "--arm", arm, "--tasks", "12", "--json"]
        assert main(command) == 1
        found = _json(capsys.readouterr().out)
        assert found["verdict"]["outcome"] == outcome
        assert main(command[:-1]) == 1
        assert says in capsys.readouterr().out.splitlines()[0]
        turned = ["quality", "--base", arm, "--arm", base, "--tasks", "12", "--json"]
        assert main(turned) == 1
        assert _json(capsys.readouterr().out)["verdict"]["outcome"] == "does not count"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"usage": None}, "gave no text with usage.completion_tokens"),
        ({"choices": [{"text": None}]}, "gave no text with usage.completion_tokens"),
        ({"choices": []}, "with what is no completion"),
        ({"choices": "none"}, "with what is no completion"),
    ],
)
def test_what_is_no_completion_is_said_in_a_line(changes: Json, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with foreign("whole", **changes) as url:
        assert main(["quality", "--base", url, "--arm", url, "--tasks", "2"]) != 0
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
