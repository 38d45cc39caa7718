"""Splits an answer that arrives in pieces at marks in it: what a model thinks, what it says, what it calls.

    text --<think> ... </think>--> reasoning | content --<tool_call> ... --> content | calls

A possible beginning of a mark is held back until it is known; nothing else is.
"""

from __future__ import annotations


class Cut:
    """Text up to a mark, and the text behind it."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._held = ""
        self.found = False

    def feed(self, text: str) -> tuple[str, str]:
        """(before, after) that this piece adds; `after` only once the mark has passed."""
        if self.found:
            return "", text
        text = self._held + text
        at = text.find(self._mark)
        if at >= 0:
            self.found, self._held = True, ""
            return text[:at], text[at + len(self._mark) :]
        keep = next(
            (n for n in range(min(len(self._mark) - 1, len(text)), 0, -1) if self._mark.startswith(text[-n:])), 0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def finish(self) -> str:
        """What was held back and is no mark."""
        held, self._held = self._held, ""
        return held


class ReasoningSplit:
    """Cuts an answer into reasoning and content.

    opens, closes  the marks
    inside         the prompt has opened the reasoning already
    """

    def __init__(self, opens: str, closes: str, inside: bool) -> None:
        self._opens = opens
        self._start = "" if not inside else None
        self._cut = Cut(closes)
        self._content_begun = False

    @property
    def inside(self) -> bool:
        """Whether the next text is reasoning; False too while it may yet begin with the opening mark."""
        return self._start is None and not self._cut.found and not self._content_begun

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that this piece adds."""
        if self._content_begun:
            return "", text
        if self._start is not None:
            self._start += text
            begun = self._start.lstrip()
            if self._opens.startswith(begun[: len(self._opens)]) and len(begun) < len(self._opens):
                return "", ""
            text, self._start = self._start, None
            if not begun.startswith(self._opens):
                self._content_begun = True
                return "", text
            text = begun[len(self._opens) :]
        reasoning, content = self._cut.feed(text)
        if self._cut.found:
            content = content.lstrip("\n")
            self._content_begun = bool(content)
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """What was held back: (reasoning, content)."""
        start, self._start = self._start, None
        return (self._cut.finish(), "") if not start else ("", start)


class ReasoningGate:
    """Where in an answer stop strings count: not in its reasoning. Sees every character at once, shown or not.

    counts     stop strings count in the reasoning too
    passed_at is the number of tokens with which the reasoning ended; None while it has not, or where there is none.
    """

    def __init__(self, opens: str, closes: str, inside: bool, counts: bool = False) -> None:
        self._counts = counts
        self._opens = opens
        self._cut = Cut(closes)
        self._lead = ""
        self._inside = inside
        self._over = False
        self.passed_at: int | None = None

    @property
    def inside(self) -> bool:
        """Whether the reasoning has begun and not ended."""
        return self._inside and not self._over

    def take(self, text: str, num_tokens: int) -> int:
        """How many of the first characters of `text` have no stop string; `num_tokens` of the answer end with it."""
        num_exempt = 0 if self._over else self._pass(text, num_tokens)
        return 0 if self._counts else num_exempt

    def _pass(self, text: str, num_tokens: int) -> int:
        """How many of the first characters of `text` are reasoning."""
        num_before = 0
        rest = text
        if not self._inside:
            self._lead += text
            begun = self._lead.lstrip()
            if not begun.startswith(self._opens):
                self._over = not self._opens.startswith(begun)
                return 0
            rest = begun[len(self._opens) :]
            self._inside, num_before = True, len(text) - len(rest)
        _, after = self._cut.feed(rest)
        if not self._cut.found:
            return num_before + len(rest)
        self._over, self.passed_at = True, num_tokens
        return len(text) - len(after)
