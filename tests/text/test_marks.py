"""Reasoning and tool calls are found however the answer is cut into pieces, and nothing that was written is lost."""

from __future__ import annotations

import json

import pytest

from steelyard.text.marks import ReasoningGate, ReasoningSplit
from steelyard.text.stream import TextStream
from steelyard.text.tokenizer import Tokenizer
from steelyard.text.tools import FORMATS, ToolCall, ToolParser, calls_schema, detect_format

STEPS = [1, 2, 3, 7, 1000]


def pieces(text: str, step: int) -> list[str]:
    return [text[i : i + step] for i in range(0, len(text), step)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "\nhm\n", "yes"),
        ("\n<think>a</think>b", False, "a", "b"),
        ("a < b </think>\nc", True, "a < b ", "c"),
        ("no thought, <think> later", False, "", "no thought, <think> later"),
        ("<thin air", False, "", "<thin air"),
        ("<thi", False, "", "<thi"),
        ("<think>cut off </thi", False, "cut off </thi", ""),
        ("cut off", True, "cut off", ""),
        ("<think></think>x</think>", False, "", "x</think>"),
    ],
)
def test_reasoning_is_split_the_same_however_it_comes(
    text: str, inside: bool, reasoning: str, content: str, step: int
) -> None:
    split = ReasoningSplit("<think>", "</think>", inside)
    parts = [*(split.feed(piece) for piece in pieces(text, step)), split.finish()]
    assert "".join(part[0] for part in parts) == reasoning
    assert "".join(part[1] for part in parts) == content


CALL = ToolCall("add", '{"a": 1, "b": [2, "</x>"]}')
JSON = '{"name": "add", "arguments": {"a": 1, "b": [2, "</x>"]}}'


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", f"Let me see.\n<tool_call>\n{JSON}\n</tool_call>", "Let me see.\n", [CALL]),
        ("hermes", f"<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>", "", [CALL, CALL]),
        ("hermes", "<tool_call>not json</tool_call> so", "<tool_call>not json</tool_call> so", []),
        ("hermes", "a <tool_cal b", "a <tool_cal b", []),
        ("hermes", f"<tool_call>{JSON}", "", [CALL]),
        ("hermes", '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
        ("mistral", f"[TOOL_CALLS][{JSON}, {JSON}]", "", [CALL, CALL]),
        ("mistral", "[1] is a list", "[1] is a list", []),
        ("llama3_json", JSON.replace("arguments", "parameters"), "", [CALL]),
        ("llama3_json", f"<|python_tag|>{JSON}; {JSON}", "", [CALL, CALL]),
        ("llama3_json", '{"a": "plain JSON"}', '{"a": "plain JSON"}', []),
        ("llama3_json", "Text, then {}", "Text, then {}", []),
        ("json", f"[{JSON}]", "", [CALL]),
        ("json", "[", "[", []),
    ],
)
def test_calls_are_read_the_same_however_they_come(
    form: str, text: str, content: str, calls: list[ToolCall], step: int
) -> None:
    parser = ToolParser(FORMATS[form])
    parts = [*(parser.feed(piece) for piece in pieces(text, step)), parser.finish()]
    assert "".join(part[0] for part in parts) == content
    assert [call for part in parts for call in part[1]] == calls


def test_a_templates_marks_say_the_format() -> None:
    assert detect_format("{{ '<tool_call>' }}") == "hermes"
    assert detect_format("[TOOL_CALLS]") == "mistral"
    assert detect_format("<|python_tag|>") == "llama3_json"
    assert detect_format("{{ messages }}") is None
    assert detect_format(None) is None


def test_shared_definitions_of_tools_stay_in_reach() -> None:
    tool = {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {}}},
    }
    schema = calls_schema([tool, {"name": "g"}], one=True)
    assert schema["$defs"] == {"A": {}}
    assert schema["maxItems"] == 1
    assert len(json.dumps(schema)) > 100


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_stop_strings_count_behind_the_reasoning_only(byte_level: Tokenizer, step: int) -> None:
    text = "<think>STOP here</think>an answer STOP more"
    ids = [i for c in text for i in byte_level.encode(c, add_special_tokens=False)]
    gate = ReasoningGate("<think>", "</think>", inside=False)
    stream, shown = TextStream(byte_level, ("STOP",), gate=gate), ""
    for at in range(0, len(ids), step):
        piece = stream.feed(ids[at : at + step])
        shown += piece.text
        if piece.stop_string:
            break
    assert shown == "<think>STOP here</think>an answer "
    assert gate.passed_at == len("<think>STOP here</think>")
    counting = TextStream(byte_level, ("STOP",), gate=ReasoningGate("<think>", "</think>", False, counts=True))
    assert counting.feed(ids).text == "<think>"
