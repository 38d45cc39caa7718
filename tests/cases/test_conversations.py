"""Limits on thinking, and a conversation whose request was abandoned; models of random weights go on for ever."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests import tiny_model
from tests.cases.configurations import CONFIGURATIONS, RIG
from tests.cases.rig import Server, open_request, wait_for

Prompts = Callable[[int], list[int]]
USER = [{"role": "user", "content": "one two"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model whose template opens its thinking."""
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "thinker")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    path.write_text(json.dumps(config))
    server = Server(folder, [*RIG, *CONFIGURATIONS["plain"]], tmp_path_factory.mktemp("logs") / "thinker.log")
    yield server
    server.check_idle()
    assert server.stop() == 0


def test_a11_a_limit_spent_on_thinking_is_told_and_a_budget_of_its_own_leaves_room_for_the_answer(
    thinker: Server,
) -> None:
    body = {"messages": USER, "max_completion_tokens": 60, "seed": 3, "logit_bias": {"2": -100}}
    cut = thinker.post(CHAT, body).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["choices"][0]["message"]["content"] == ""
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == cut["usage"]["completion_tokens"] == 60
    num_closing = len(thinker.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json()["tokens"])
    bounded = thinker.post(CHAT, {**body, "thinking_token_budget": 12}).json()
    assert bounded["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12 + num_closing
    assert bounded["choices"][0]["message"]["content"]
    assert bounded["choices"][0]["message"]["reasoning_content"]
    held = thinker.post(
        CHAT, {**body, "thinking_token_budget": 5, "structured_outputs": {"choice": ["sea", "ship"]}}
    ).json()
    assert held["choices"][0]["finish_reason"] == "stop"
    assert held["choices"][0]["message"]["content"] in ("sea", "ship")


@pytest.mark.on("narrow")
def test_k15_a_conversation_goes_on_after_a_request_of_it_was_abandoned_in_the_queue(
    server: Server, prompts: Prompts
) -> None:
    first = server.post("/v1/responses", {"input": "one two", "max_output_tokens": 4}).json()
    long = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    socks = [open_request(server, {"prompt": prompts(20), **long}) for _ in range(2)]
    wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 2, 60, lambda: "the slots are not taken")
    going_on = {"input": "three", "previous_response_id": first["id"], "max_output_tokens": 4}
    queued = open_request(server, going_on, "/v1/responses")
    wait_for(lambda: server.metrics()["vllm:num_requests_waiting"] == 1, 60, lambda: "it does not wait")
    queued.close()
    wait_for(lambda: server.metrics()["vllm:num_requests_waiting"] == 0, 60, lambda: "it still waits")
    for sock in socks:
        sock.close()
    again = server.post("/v1/responses", going_on)
    assert again.status_code == 200
    assert again.json()["previous_response_id"] == first["id"]
