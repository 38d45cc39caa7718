"""An answer as the output items of /v1/responses, and the events that tell of their growth.

    Said --> reasoning item | message item | function calls, in the order they come; one is open at a time

Streamed or not, items are made by the same code: a whole answer is a stream whose events nobody reads.
"""

from __future__ import annotations

import uuid
from typing import Any

from steelyard.server.dialogue import Said
from steelyard.server.protocol import FunctionCall, Message, ToolCallPart

Event = dict[str, Any]


class Output:
    """Items of one answer as they grow."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def feed(self, said: Said) -> list[Event]:
        """Take what a chunk adds; the events of it."""
        events: list[Event] = []
        if said.reasoning:
            events += self._write("reasoning", said.reasoning)
        if said.content:
            events += self._write("message", said.content)
        for call in said.calls:
            events += self._close("completed") + self._call(call)
        return events

    def finish(self, status: str) -> list[Event]:
        """The end: what is open is closed with this status; an answer of nothing is an empty message."""
        first = self._begin("message") if not self.items else []
        return first + self._close(status)

    def message(self) -> Message:
        """All of it as a turn of the conversation."""
        texts = {kind: [item["content"][0]["text"] for item in self.items if item["type"] == kind] for kind in _PARTS}
        calls = [
            ToolCallPart(
                id=item["call_id"],
                type="function",
                function=FunctionCall(name=item["name"], arguments=item["arguments"]),
            )
            for item in self.items
            if item["type"] == "function_call"
        ]
        return Message(
            role="assistant",
            content="".join(texts["message"]) or (None if calls else ""),
            reasoning_content="".join(texts["reasoning"]) or None,
            tool_calls=calls or None,
        )

    def _write(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            events = self._close("completed") + self._begin(kind)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        delta = self._event(f"response.{_PARTS[kind]}.delta", content_index=0, delta=text)
        return [*events, delta | ({"logprobs": []} if kind == "message" else {})]

    def _begin(self, kind: str) -> list[Event]:
        item: dict[str, Any] = {"id": f"{_PREFIX[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if kind == "message":
            item["role"] = "assistant"
        else:
            item["summary"] = []
        added = self._add({**item, "content": []})
        item["content"] = [_part(kind)]
        self._open = self.items[-1] = item
        return [added, self._event("response.content_part.added", content_index=0, part=_part(kind))]

    def _close(self, status: str) -> list[Event]:
        item, name = self._open, ""
        if item is None:
            return []
        name, part = _PARTS[item["type"]], item["content"][0]
        item["status"] = status
        done = self._event(f"response.{name}.done", content_index=0, text=part["text"])
        events = [
            done | ({"logprobs": []} if item["type"] == "message" else {}),
            self._event("response.content_part.done", content_index=0, part=dict(part)),
            {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item},
        ]
        self._open = None
        return events

    def _call(self, call: dict[str, Any]) -> list[Event]:
        """A call is complete when it is known."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": name,
            "arguments": "",
        }
        added = self._add(item)
        self.items[-1] = item = {**item, "status": "completed", "arguments": arguments}
        return [
            added,
            self._event("response.function_call_arguments.delta", delta=arguments),
            self._event("response.function_call_arguments.done", name=name, arguments=arguments),
            {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item},
        ]

    def _add(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event of the last item."""
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
_PREFIX = {"reasoning": "rs", "message": "msg"}


def _part(kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
    return part | ({"annotations": [], "logprobs": []} if kind == "message" else {})
