"""Section D: streaming, detokenisation, stop strings. Text is forced by a scripted server, one byte a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cases.configurations import SCRIPTED
from tests.cases.rig import Server, texts

Prompts = Callable[[int], list[int]]


@pytest.fixture
def script(scripted: Server) -> Iterator[Server]:
    scripted.check_canary()
    yield scripted
    scripted.check_idle()
    scripted.check_canary()


def both(server: Server, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same request whole and streamed: (the choice, the stream's chunks); their texts must be equal."""
    body = {"max_tokens": 100, "temperature": 0, **body}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    chunks = texts(server.stream(**body))
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [c["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    return whole, chunks


def test_d01_a_stop_string_is_never_seen(script: Server) -> None:
    whole, _ = both(script, prompt=[10], stop="STOP")
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == ("one two ", "stop", "STOP")


def test_d03_text_held_back_is_delivered_at_the_end(script: Server) -> None:
    whole, chunks = both(script, prompt=[11], stop="abc")
    assert (whole["text"], whole["finish_reason"]) == ("xyz ab", "stop")
    assert chunks[-1]["text"].endswith("ab")


def test_d05_a_stop_string_just_before_the_end_of_text_is_one_end(script: Server) -> None:
    whole, chunks = both(script, prompt=[10], stop="three")
    assert (whole["text"], whole["stop_reason"]) == ("one two STOP ", "three")
    assert sum(chunk["finish_reason"] is not None for chunk in chunks) == 1


def test_d07_no_character_is_split(script: Server) -> None:
    whole, chunks = both(script, prompt=[12])
    assert whole["text"] == SCRIPTED[12]
    assert "\ufffd" not in whole["text"]
    assert len([chunk for chunk in chunks if chunk["text"]]) <= len(SCRIPTED[12])


@pytest.mark.parametrize("include_usage", [False, True])
def test_d13_a_stream_ends_in_exactly_one_done(server: Server, prompts: Prompts, include_usage: bool) -> None:
    body: dict[str, Any] = {"prompt": prompts(9), "max_tokens": 5, "ignore_eos": True}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    data = [item for _, item in server.stream(**body)]
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    assert ('"completion_tokens":5' in data[-2]) == include_usage


def test_d15_choices_of_different_length_end_once_each(server: Server, prompts: Prompts) -> None:
    body: dict[str, Any] = {"prompt": prompts(20), "n": 8, "seed": 4, "temperature": 1.0, "max_tokens": 60}
    body["stop_token_ids"] = list(range(3, 60))
    whole = {c["index"]: c for c in server.completions(**body, return_token_ids=True)["choices"]}
    chunks = texts(server.stream(**body, ignore_eos=True, return_token_ids=True))
    assert len({len(choice["token_ids"]) for choice in whole.values()}) > 1
    for index, choice in whole.items():
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert [token for chunk in mine for token in chunk["token_ids"]] == choice["token_ids"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["finish_reason"] is not None


def test_d21_newlines_in_text_do_not_break_the_framing(script: Server) -> None:
    whole, _ = both(script, prompt=[13])
    assert whole["text"] == SCRIPTED[13]
    assert "\n\ndata: c" in whole["text"].replace("\r\n", "\n")


def test_p11_a_stop_string_within_min_tokens_is_text(script: Server) -> None:
    early, _ = both(script, prompt=[14], stop="STOP")
    assert early["text"] == ""
    late, _ = both(script, prompt=[14], stop="STOP", min_tokens=5)
    assert (late["text"], late["finish_reason"]) == ("STOP and ", "stop")
