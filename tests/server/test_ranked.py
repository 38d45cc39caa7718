"""best_of, prompt_logprobs, min_tokens: choices made and shown, thoughts of the prompt, ends that come too early."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.text.tokenizer import Tokenizer
from steelyard.wire.messages import Delta, Deltas, Logprob
from tests.server.real_engine import RealEngine, serve
from tests.server.served import Served


@pytest.fixture
def graded(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Choice i of a prompt has tokens of log-probability -grade[i]."""
    grades = [3.0, 1.0, 2.0, 0.5]
    plain = served.engine.say

    def say(*messages: Any) -> None:
        for message in messages:
            if isinstance(message, Deltas):
                items = [
                    Delta(d.id, d.index, d.ids, [Logprob(-grades[d.index])] * len(d.ids) if d.logprobs else None)
                    for d in message.items
                ]
                message = Deltas(items)
            plain(message)

    monkeypatch.setattr(served.engine, "say", say)
    return served


def test_the_best_of_several_choices_are_shown_ranked_by_logprob_a_token(graded: Served) -> None:
    answer = graded.openai.completions.create(
        model="tiny", prompt=["The sea", "one two"], best_of=4, n=2, max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    shown: Any = [choice.token_ids for choice in answer.choices]  # type: ignore[attr-defined]
    assert shown == [[43] * 3, [41] * 3] * 2, "choice i is made of the token 40 + i"
    prompts: Any = [choice.prompt_token_ids for choice in answer.choices]  # type: ignore[attr-defined]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage is not None and answer.usage.completion_tokens == 2 * 4 * 3
    assert [submit.sampling.n for submit in graded.engine.submits] == [4, 4]
    one = graded.complete(best_of=3, max_tokens=2, logprobs=0).json()["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in one] == [[-1.0, -1.0]]


def test_best_of_equal_to_n_is_n(served: Served) -> None:
    choices = served.complete(best_of=2, n=2, max_tokens=1).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert served.engine.submits[-1].sampling.logprobs is None


def test_prompt_logprobs_in_vllms_shape(served: Served) -> None:
    served.engine.reply = lambda submit, index: [40, 2]
    for path, body in (("/v1/completions", {"prompt": [5, 6, 7]}), ("/v1/chat/completions", {})):
        body = body or {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        answer = served.post(path, {**body, "prompt_logprobs": 2, "max_tokens": 1}).json()
        assert served.engine.submits[-1].sampling.prompt_logprobs == 2
        found = answer["choices"][0]["prompt_logprobs"] if path == "/v1/completions" else answer["prompt_logprobs"]
        tokens = served.engine.submits[-1].tokens
        assert len(found) == len(tokens)
        assert found[0] is None
        assert all(str(token) in entry for token, entry in zip(tokens[1:], found[1:]))
    assert "prompt_logprobs" not in served.complete(max_tokens=1).json()["choices"][0]


def test_echo_and_prompt_logprobs_keep_their_own_counts(served: Served) -> None:
    answer = served.complete(prompt=[5, 6, 7], echo=True, logprobs=1, prompt_logprobs=3, max_tokens=1)
    assert answer.status_code == 200
    assert served.engine.submits[-1].sampling.prompt_logprobs == 3


def test_a_stop_id_within_min_tokens_is_text_and_the_first_one_after_ends_it(tokenizer: Tokenizer) -> None:
    """The scripted engine says 40 41 42 over and over, whatever is asked."""
    for real in serve(tokenizer, None, RealEngine(vocab_size=tokenizer.vocab_size)):
        for early, count in ((2, 3), (3, 6), (5, 6), (6, 9)):
            body = {"stop_token_ids": [42], "min_tokens": early, "max_tokens": 20, "return_token_ids": True}
            [choice] = real.complete(**body).json()["choices"]
            assert choice["token_ids"] == [40, 41, 42] * (count // 3)
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 42)
            assert choice["text"] == tokenizer.decode(choice["token_ids"][:-1])
