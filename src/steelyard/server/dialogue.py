"""What one choice of a chat says, thinks and calls, from its text as it comes.

chunk.text --ReasoningSplit--> reasoning | content --ToolParser--> content | calls
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from steelyard.server.run import Chunk, Reasoning
from steelyard.text.marks import ReasoningSplit
from steelyard.text.tools import ToolCall, ToolFormat, ToolParser

THINK = ("<think>", "</think>")
"""The marks of every reasoning family that is read here."""


@dataclass(slots=True)
class Said:
    """What a chunk adds; `calls` are complete, in OpenAI's shape, each with its number among all."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def nothing(self) -> bool:
        return not (self.reasoning or self.content or self.calls)


class Dialogue:
    """One choice's state.

    tools      how calls are written; None: what looks like one stays in the content
    reasoning  its marks; None: they stay in the content
    only_one   calls behind the first are left out, as the client asked
    """

    def __init__(self, tools: ToolFormat | None, reasoning: Reasoning | None, only_one: bool) -> None:
        self._split = ReasoningSplit(reasoning.opens, reasoning.closes, reasoning.inside) if reasoning else None
        self._tools = ToolParser(tools) if tools is not None else None
        self._only_one = only_one
        self.num_calls = 0

    def feed(self, chunk: Chunk) -> Said:
        """Take a chunk; its last one delivers all that was held back."""
        said = Said()
        parts = [self._split.feed(chunk.text)] if self._split else [("", chunk.text)]
        if chunk.finish_reason is not None and self._split:
            parts.append(self._split.finish())
        for reasoning, content in parts:
            said.reasoning += reasoning
            self._say(said, *(self._tools.feed(content) if self._tools else (content, [])))
        if chunk.finish_reason is not None and self._tools:
            self._say(said, *self._tools.finish())
        return said

    def finish_reason(self, chunk: Chunk) -> str | None:
        """A choice that ended by itself after calls ended for them."""
        return "tool_calls" if chunk.finish_reason == "stop" and self.num_calls else chunk.finish_reason

    def _say(self, said: Said, content: str, calls: list[ToolCall]) -> None:
        said.content += content
        for call in calls:
            if self._only_one and self.num_calls:
                return
            said.calls.append(
                {
                    "index": self.num_calls,
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            )
            self.num_calls += 1
