"""/v1/chat/completions with the official client: whole and streamed, templates, logprobs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests import tiny_model
from tests.server.served import Served
from tests.server.test_completions import events

USER = [{"role": "user", "content": "one two"}]
HEAD = f"{tiny_model.BOS}{tiny_model.IM_START}"


def prompt_text(served: Served) -> str:
    return served.tokenizer.decode(served.engine.submits[-1].tokens, skip_special_tokens=False)


def chat(served: Served, **body: Any) -> Any:
    return served.post("/v1/chat/completions", {"messages": USER, **body})


def test_whole_answer(served: Served) -> None:
    served.say("five sail")
    answer = served.openai.chat.completions.create(model="tiny", messages=USER)  # type: ignore[arg-type]
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "five sail", "stop")
    assert answer.object == "chat.completion"
    assert prompt_text(served) == f"{HEAD}user\none two<|im_end|>\n<|im_start|>assistant\n"
    assert served.engine.submits[-1].sampling.max_tokens is None


def test_stream_begins_with_a_token_and_equals_the_whole(served: Served) -> None:
    served.say("five\n\n\U0001f642 sail")
    stream = served.openai.chat.completions.create(
        model="tiny",
        messages=USER,  # type: ignore[arg-type]
        stream=True,
        n=3,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 3 * (len("five\n\n\U0001f642 sail".encode()) + 1)
    for index in range(3):
        mine = [p.choices[0] for p in parts[:-1] if p.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[0].delta.content == "f"
        assert all(c.delta.role is None for c in mine[1:])
        assert "".join(c.delta.content or "" for c in mine) == "five\n\n\U0001f642 sail"
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "stop"


def test_async_client_and_sixty_streams_at_once(served: Served) -> None:
    served.say("one two three four")

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)  # type: ignore
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def all_of_them() -> list[str]:
        async with served.async_openai as client:
            return await asyncio.gather(*(one(client) for _ in range(60)))

    assert asyncio.run(all_of_them()) == ["one two three four"] * 60


def test_a_character_is_never_split_over_events(served: Served) -> None:
    text = "\U0001f44d\U0001f3fd 日本 हिन्दी"
    served.say(text)
    data = events(served, "/v1/chat/completions", messages=USER)
    pieces = [json.loads(d)["choices"][0]["delta"]["content"] for d in data[:-1]]
    assert "".join(pieces) == text
    assert len([p for p in pieces if p]) == len(text)
    assert "\ufffd" not in "".join(pieces)


def test_logprobs_have_chats_own_shape(served: Served) -> None:
    served.say("aé")
    content = chat(served, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in content][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert bytes(b for e in content[:3] for b in e["bytes"]).decode() == "aé"
    assert all(e["logprob"] == -0.5 and len(e["top_logprobs"]) == 2 for e in content)
    plain = chat(served, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [e["top_logprobs"] for e in plain] == [[]] * len(plain)
    assert chat(served).json()["choices"][0]["logprobs"] is None


def test_parts_developer_role_and_max_completion_tokens(served: Served) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    answer = chat(served, messages=messages, max_completion_tokens=3, return_token_ids=True).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["token_ids"] == [40, 40, 40]
    assert answer["prompt_token_ids"] == served.engine.submits[-1].tokens
    assert f"{HEAD}system\nbe brief<|im_end|>" in prompt_text(served)
    assert "user\none\ntwo<|im_end|>" in prompt_text(served)


def test_the_final_message_can_be_continued(served: Served) -> None:
    messages = [*USER, {"role": "assistant", "content": "three four"}]
    chat(served, messages=messages, continue_final_message=True, max_tokens=1)
    assert prompt_text(served).endswith("assistant\nthree four")
    chat(served, add_generation_prompt=False, max_tokens=1)
    assert prompt_text(served).endswith("one two<|im_end|>\n")
    both = chat(served, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert (both.status_code, both.json()["error"]["param"]) == (400, "continue_final_message")


def test_the_template_refuses_with_its_own_words(served: Served) -> None:
    response = chat(served, messages=USER * 2)
    assert response.status_code == 400
    assert "two user turns in a row" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt", "bos_token"])
def test_template_arguments_cannot_take_the_place_of_fields(served: Served, name: str) -> None:
    response = chat(served, chat_template_kwargs={name: "x"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"chat_template_kwargs.{name}"


def test_tokenize_counts_what_a_chat_counts(served: Served) -> None:
    tokens = served.post("/tokenize", {"messages": USER, "return_token_strs": True}).json()
    usage = chat(served, max_tokens=1).json()["usage"]
    assert tokens["count"] == len(tokens["tokens"]) == usage["prompt_tokens"]
    assert tokens["tokens"] == served.engine.submits[-1].tokens
    assert tokens["tokens"].count(0) == 1
    assert tokens["token_strs"][0] == tiny_model.BOS
    text = served.post("/tokenize", {"prompt": "The sea"}).json()["tokens"]
    assert text[0] == 0
    info = served.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == (tiny_model.BOS, tiny_model.IM_END)
    assert (info["vocab_size"], info["chat_template"]) == (tiny_model.VOCAB_SIZE, tiny_model.TEMPLATE)
    bare = served.post("/tokenize", {"prompt": "The sea", "add_special_tokens": False}).json()["tokens"]
    assert served.post("/detokenize", {"tokens": bare}).json() == {"prompt": "The sea"}
