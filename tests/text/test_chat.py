from __future__ import annotations

from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from steelyard.checkpoint.entry import Checkpoint
from steelyard.errors import InvalidRequest
from steelyard.text.chat import ChatTemplate
from tests.text.templates import SMALL_TEMPLATES, TEMPLATES, TOOLS

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <b>&amp; 'you'"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi\n"}],
    "turns": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\none"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "日本"},
    ],
    "tools": [
        {"role": "user", "content": "Weather in Oslo and Rome?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "abcdefgh1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Oslø", "days": 2}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": '{"t": 3}'},
        {"role": "assistant", "content": "3 degrees."},
        {"role": "user", "content": "Thanks"},
    ],
}


def theirs(template: str, chat: list[dict[str, Any]], **kwargs: Any) -> str:
    kept = [{k: v for k, v in m.items() if v is not None} for m in chat]
    return render_jinja_template([kept], chat_template=template, bos_token="<s>", eos_token="</s>", **kwargs)[0][0]


@pytest.mark.parametrize("with_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str, chat: str, with_prompt: bool) -> None:
    tools = TOOLS if chat == "tools" else None
    ours = ChatTemplate(TEMPLATES[name], "<s>", "</s>")
    try:
        expected = theirs(TEMPLATES[name], CHATS[chat], tools=tools, add_generation_prompt=with_prompt)
    except (jinja2.TemplateError, TypeError):
        with pytest.raises(InvalidRequest):
            ours.render(CHATS[chat], tools=tools, add_generation_prompt=with_prompt)
        return
    assert ours.render(CHATS[chat], tools=tools, add_generation_prompt=with_prompt) == expected
    assert "Thanks" in expected or chat != "tools"


def test_at_most_a_few_pairs_of_template_and_chat_are_refused() -> None:
    """So that the comparison above compares texts, not refusals."""
    refused = 0
    for template in TEMPLATES.values():
        for name, chat in CHATS.items():
            try:
                theirs(template, chat, tools=TOOLS if name == "tools" else None)
            except (jinja2.TemplateError, TypeError):
                refused += 1
    assert refused <= 2


def test_smollm2s_own_template(smollm2: Checkpoint) -> None:
    template = smollm2.chat_template
    assert template
    assert ChatTemplate(template, "<|im_start|>", "<|im_end|>").render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", SMALL_TEMPLATES)
def test_what_templates_may_use(name: str) -> None:
    template, expected = SMALL_TEMPLATES[name]
    chat = [{"role": "user", "content": "a<b"}, {"role": "assistant", "content": "é"}]
    got = ChatTemplate(template, "<s>", "</s>").render(chat, tools=TOOLS, enable_thinking=True)
    assert got == theirs(template, chat, tools=TOOLS, enable_thinking=True, add_generation_prompt=True)
    assert expected in got


@pytest.mark.parametrize(
    "escape",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__init__=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ dict.__globals__ }}{{ dict.__self__.x }}",
        "{{ range(1000000000) | list }}",
        "{{ cycler.__init__.__globals__.os.x }}",
        "{% include 'x' %}",
    ],
)
def test_the_sandbox_holds(escape: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(escape, None, None).render([{"role": "user", "content": "x"}])


def test_a_template_refuses_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", None, None)
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_without_a_template_or_with_a_broken_one_only_rendering_fails() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None, None, None).render([{"role": "user", "content": "x"}])
    with pytest.raises(InvalidRequest, match="line 2"):
        ChatTemplate("a\n{% nonsense %}", None, None).render([{"role": "user", "content": "x"}])


def test_text_parts_become_a_string_where_the_template_wants_one() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role + ':' + m['content'] }};{% endfor %}", None, None)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "user:a\nb;"


def test_a_string_becomes_parts_where_the_template_wants_parts() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}", None, None
    )
    assert template.render([{"role": "user", "content": "abc"}]) == "abc|"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a|b|"


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            r"messages\[0\].content\[0\].*image_url",
        ),
        ({"role": "user", "content": 3}, r"messages\[0\].content"),
        ({"content": "x"}, r"messages\[0\].*role"),
    ],
)
def test_a_malformed_message_is_named(message: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidRequest, match=where):
        ChatTemplate("{{ messages }}", None, None).render([message])


def test_arguments_of_tool_calls_may_be_json_text() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.city }}", None, None)
    call = {"type": "function", "function": {"name": "w", "arguments": '{"city": "Rome"}'}}
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "Rome"


def test_null_content_is_absent() -> None:
    template = ChatTemplate("{{ 'content' in messages[0] }}", None, None)
    assert template.render([{"role": "assistant", "content": None}]) == "False"
