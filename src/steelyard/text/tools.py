"""How model families write tool calls, as a table, and reading them out of an answer that arrives in pieces.

    hermes   <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>   Hermes, Qwen 2.5 and 3, SmolLM2
    llama3_json  {"name": ..., "parameters": {...}}                       Llama 3.1, 3.2; <|python_tag|> may precede
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]         Mistral
    json     [{"name": ..., "parameters": {...}}, ...]                    an output held to a grammar by the server

What looks like a call and is none (not JSON, no name) stays text: nothing a model wrote is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steelyard.text.marks import Cut


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """opens, closes: marks around one call or one list of calls. `whole`: the answer is calls from its first letter."""

    opens: str
    closes: str = ""
    whole: bool = False


FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "llama3_json": ToolFormat("<|python_tag|>", whole=True),
    "mistral": ToolFormat("[TOOL_CALLS]"),
    "json": ToolFormat("", whole=True),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text, as clients expect it."""

    name: str
    arguments: str


def detect_format(template: str | None) -> str | None:
    """The format a chat template was written for, by the marks in it; None if it shows none."""
    source = template or ""
    if "<tool_call>" in source:
        return "hermes"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<|python_tag|>" in source or "Environment: ipython" in source or '"parameters": dictionary' in source:
        return "llama3_json"
    return None


class ToolParser:
    """Takes an answer's text; gives back content to show and calls that are complete."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._open = Cut(form.opens) if form.opens else None
        self._close: Cut | None = None
        self._body = ""
        self._inside = form.whole and not form.opens
        self._begun = False
        self._skips_newlines = False  # behind a call, up to the next text

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        content, calls = "", list[ToolCall]()
        while text:
            if not self._inside:
                if self._skips_newlines:
                    text = text.lstrip("\n")
                    self._skips_newlines = not text
                shown, text = self._outside(text)
                content += shown
                continue
            if not self._form.closes:
                self._body += text
                break
            self._close = self._close or Cut(self._form.closes)
            body, text = self._close.feed(text)
            self._body += body
            if self._close.found:
                shown, found = self._complete(self._form.opens, self._form.closes)
                content += shown
                calls += found
                self._inside, self._close, self._open = False, None, Cut(self._form.opens)
                self._skips_newlines = bool(found)
        return content, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """At the answer's end: what was held back, as calls if it is some and as text if not."""
        if not self._inside:
            return (self._open.finish() if self._open else ""), []
        if self._close is not None:
            self._body += self._close.finish()
        return self._complete(self._form.opens if not self._form.whole else "", "")

    def _outside(self, text: str) -> tuple[str, str]:
        """(to show, behind the opening mark)."""
        assert self._open is not None, "a format without marks is always inside"
        if self._form.whole and not self._begun and text.strip():
            self._begun = True
            if text.lstrip().startswith("{"):
                self._inside = True
                return "", text
        shown, after = self._open.feed(text)
        self._inside = self._open.found
        return shown, after

    def _complete(self, opens: str, closes: str) -> tuple[str, list[ToolCall]]:
        body, self._body = self._body, ""
        calls = read_calls(body)
        return ("", calls) if calls else (opens + body + closes, [])


def read_calls(text: str) -> list[ToolCall]:
    """The calls in a JSON object, a list of objects, or objects joined by semicolons; none if it is not that."""
    values = _values(text.strip())
    calls: list[ToolCall] = []
    for value in values:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str):
            return []
        arguments = value.get("arguments", value.get("parameters", {}))
        text_of = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(name, text_of))
    return calls


def _values(text: str) -> list[Any]:
    values: list[Any] = []
    decoder = json.JSONDecoder()
    try:
        while text:
            value, end = decoder.raw_decode(text)
            values += value if isinstance(value, list) else [value]
            text = text[end:].lstrip(" \n;")
    except (ValueError, RecursionError):
        return []
    return values


def calls_schema(tools: Sequence[dict[str, Any]], one: bool) -> dict[str, Any]:
    """A JSON schema of a list of calls of these functions (OpenAI's `function` objects); `one`: of exactly one."""
    shared: dict[str, Any] = {}
    for tool in tools:
        shared |= (tool.get("parameters") or {}).get("$defs", {})
    items = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["name"]},
                "parameters": tool.get("parameters") or {"type": "object", "additionalProperties": False},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": items[0] if len(items) == 1 else {"anyOf": items},
    }
    return schema | ({"maxItems": 1} if one else {}) | ({"$defs": shared} if shared else {})
