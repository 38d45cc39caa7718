"""/v1/completions over HTTP with a scripted engine: shapes, streams, prompts, stop strings, logprobs."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from steelyard.core.hashing import chain, root_hash
from steelyard.wire.messages import Refused
from tests.server.fake_engine import BLOCK_SIZE, MAX_MODEL_LEN
from tests.server.served import Served, chunks, events


def test_whole_answer_has_openai_shape_and_usage(served: Served) -> None:
    served.say("one two")
    answer = served.openai.completions.create(model="tiny", prompt="The sea is wide and the ship is small; the wind")
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == ("one two", "stop", 0)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    usage = answer.usage
    assert usage is not None
    submit = served.engine.submits[0]
    assert usage.prompt_tokens == len(submit.tokens)
    assert usage.completion_tokens == len("one two") + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == BLOCK_SIZE


def test_usage_says_how_many_tokens_of_a_longer_context_were_seen(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.say("one two")
    assert served.service.client.info is not None
    assert "context_bounded_to" not in served.complete().json()["usage"]
    for name, value in (("kv_window", 6), ("kv_sinks", 1)):
        monkeypatch.setitem(served.service.client.info.config, name, value)
    bounded = served.complete().json()["usage"]
    assert bounded["context_bounded_to"] == 7 < bounded["total_tokens"]
    assert chunks(served, max_tokens=60, stream_options={"include_usage": True})[-1]["usage"]["context_bounded_to"] == 7
    monkeypatch.setitem(served.service.client.info.config, "kv_window", bounded["total_tokens"] - 1)
    assert "context_bounded_to" not in served.complete().json()["usage"], "all of it was seen"


def test_stream_equals_whole_and_ends_each_choice_once(served: Served) -> None:
    served.say("one\n\ntwo \U0001f642 three")
    whole = served.complete(max_tokens=60, n=2).json()
    parts = chunks(served, max_tokens=60, n=2, stream_options={"include_usage": True})
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts[:-1])
    for choice in whole["choices"]:
        mine = [p["choices"][0] for p in parts[:-1] if p["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"] == "one\n\ntwo \U0001f642 three"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"


def test_no_usage_key_unless_asked(served: Served) -> None:
    served.say("one")
    assert all("usage" not in part for part in chunks(served))


@pytest.mark.parametrize(
    ("prompt", "num"),
    [("The sea", 1), (["one", "two", "three"], 3), ([5, 6, 7], 1), ([[5], [6, 7], [8, 9, 10], [5]], 4)],
)
def test_every_form_of_prompt_gives_its_choices_in_order(served: Served, prompt: Any, num: int) -> None:
    served.engine.reply = lambda submit, index: [submit.tokens[-1], 50 + index, 2]
    answer = served.complete(prompt=prompt, n=2, return_token_ids=True).json()
    assert [c["index"] for c in answer["choices"]] == list(range(2 * num))
    assert len(served.engine.submits) == num
    for choice in answer["choices"]:
        prompt_ids = served.engine.submits[choice["index"] // 2].tokens
        assert choice["prompt_token_ids"] == prompt_ids
        assert choice["token_ids"] == [prompt_ids[-1], 50 + choice["index"] % 2, 2]
    assert answer["usage"]["prompt_tokens"] == sum(len(s.tokens) for s in served.engine.submits)
    assert answer["usage"]["completion_tokens"] == 6 * num


def test_submit_carries_the_keys_of_full_blocks(served: Served) -> None:
    ids = [5 + i % 50 for i in range(50)]
    served.complete(prompt=ids, max_tokens=1)
    expected = chain(root_hash("f" * 64, "float32/16"), ids, BLOCK_SIZE)
    assert len(expected) == 3
    assert served.engine.submits[0].block_hashes == expected


def test_unset_max_tokens_is_openais_sixteen_and_never_more_than_the_room(served: Served) -> None:
    served.complete()
    served.complete(min_tokens=20)
    served.complete(prompt=[5] * (MAX_MODEL_LEN - 4))
    assert [s.sampling.max_tokens for s in served.engine.submits] == [16, 20, 4]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_cuts_text_and_tells_the_engine(served: Served, per_step: int, stream: bool, joined: bool) -> None:
    served.say("one two STOP three and much more of it")
    served.engine.per_step, served.engine.joined = per_step, joined
    body: dict[str, Any] = {"stop": ["STOP", "never"], "max_tokens": 60}
    if stream:
        parts = chunks(served, **body, stream_options={"include_usage": True})
        text = "".join(p["choices"][0]["text"] for p in parts[:-1])
        last, usage = parts[-2]["choices"][0], parts[-1]["usage"]
    else:
        answer = served.complete(**body).json()
        last, usage = answer["choices"][0], answer["usage"]
        text = last["text"]
    assert text == "one two "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "STOP")
    assert usage["completion_tokens"] == len("one two ")
    if per_step < 100:
        (stop,) = served.engine.stops
        assert (stop.index, stop.reason, stop.keep) == (0, "stop_string", len("one two "))


def test_held_back_text_is_delivered_when_no_stop_string_comes(served: Served) -> None:
    served.say("xyz ab")
    assert "".join(p["choices"][0]["text"] for p in chunks(served, stop="abc")) == "xyz ab"


def test_stop_string_can_be_kept_in_the_text(served: Served) -> None:
    served.say("one STOP two")
    answer = served.complete(stop="STOP", include_stop_str_in_output=True).json()
    assert answer["choices"][0]["text"] == "one STOP"


@pytest.mark.parametrize("joined", [False, True])
def test_stop_token_ends_without_its_text_and_is_named(served: Served, joined: bool) -> None:
    served.engine.reply = lambda submit, index: [40, 41, 42]
    served.engine.joined = joined
    shown = served.tokenizer.decode([40, 41])
    choice = served.complete(stop_token_ids=[42]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (shown, "stop", 42)
    kept = served.complete(stop_token_ids=[42], include_stop_str_in_output=True).json()["choices"][0]
    assert kept["text"] == served.tokenizer.decode([40, 41, 42])


def test_logprobs_have_one_entry_a_token_and_survive_a_stop_string(served: Served) -> None:
    served.say("ab STOP")
    answer = served.complete(logprobs=2, stop="STOP", return_token_ids=True).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert served.tokenizer.decode(answer["choices"][0]["token_ids"]) == "ab "
    assert logprobs["tokens"] == ["a", "b", " "]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    streamed = [p["choices"][0]["logprobs"] for p in chunks(served, logprobs=2, stop="STOP")]
    assert [t for part in streamed for t in part["tokens"]] == ["a", "b", " "]
    assert [t for part in streamed for t in part["text_offset"]] == [0, 1, 2]


def test_a_token_whose_text_is_held_back_is_held_back_too(served: Served) -> None:
    """Three tokens come at once and one of them may begin a stop string."""
    served.engine.per_step = 3
    served.say("one STOP")
    whole = served.complete(stop="STOP", logprobs=0, return_token_ids=True).json()["choices"][0]
    parts = [p["choices"][0] for p in chunks(served, stop="STOP", logprobs=0, return_token_ids=True)]
    assert served.tokenizer.decode(whole["token_ids"]) == "one "
    assert [i for part in parts for i in part["token_ids"]] == whole["token_ids"]
    assert [t for part in parts for t in part["logprobs"]["tokens"]] == ["o", "n", "e", " "]


def test_logprobs_zero_gives_the_chosen_token_alone(served: Served) -> None:
    served.say("ab")
    logprobs = served.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def test_echo_shows_the_prompt_and_its_logprobs_with_a_null_first(served: Served) -> None:
    served.say("ab")
    plain = served.complete(echo=True).json()["choices"][0]
    assert plain["text"] == "The seaab"
    choice = served.complete(echo=True, logprobs=1).json()["choices"][0]
    num_prompt = len(served.engine.submits[0].tokens)
    assert choice["text"] == "The seaab"
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (num_prompt - 1 + 3)
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert "".join(p["choices"][0]["text"] for p in chunks(served, echo=True)) == "The seaab"


def test_refused_becomes_an_http_error_before_any_header(served: Served) -> None:
    served.engine.refuse = Refused("", 400, "context_length_exceeded", "prompt: 1002 tokens, 784 fit", "prompt")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            served.openai.completions.create(model="tiny", prompt="x", stream=stream)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"
    served.engine.refuse = Refused("", 503, "overloaded", "too much", None, 2.5)
    response = served.complete()
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")


def test_failure_before_the_first_token_is_an_http_error_not_an_empty_stream(served: Served) -> None:
    served.engine.fail_at = 0
    for stream in (False, True):
        response = served.complete(stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the row failed: not a number"
        assert response.json()["error"]["type"] == "server_error"


def test_failure_later_is_an_error_event_and_no_done(served: Served) -> None:
    served.engine.fail_at = 3
    data = events(served)
    assert "[DONE]" not in data
    assert json.loads(data[-1])["error"]["code"] == "request_failed"
    with pytest.raises(openai.APIError, match="not a number"):
        list(served.openai.completions.create(model="tiny", prompt="x", stream=True))


def test_without_tokenizer_ids_go_in_and_out(bare: Served) -> None:
    bare.engine.reply = lambda submit, index: [7, 8, 9, 2]
    answer = bare.complete(prompt=[5, 6], logprobs=1).json()["choices"][0]
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("", [7, 8, 9, 2], "stop")
    assert answer["logprobs"]["tokens"] == [f"token_id:{i}" for i in (7, 8, 9, 2)]
    parts = chunks(bare, prompt=[5, 6])
    assert [i for p in parts for i in p["choices"][0]["token_ids"]] == [7, 8, 9, 2]
    for body in ({"prompt": "text"}, {"prompt": [5], "stop": "x"}):
        assert bare.post("/v1/completions", body).status_code == 400
    assert bare.post("/tokenize", {"prompt": "x"}).status_code == 400
