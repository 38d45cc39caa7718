"""Token ids of one answer in, text out as it can be shown: whole characters, nothing that may be a stop string.

    ids --table--> bytes --UTF-8, incremental--> characters --stop automaton--> shown | held
                          (half a character waits)            (a possible stop string waits)

The concatenation of all pieces and `finish()` is what decoding all ids at once gives, up to the stop string.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

from steelyard.core.sampling import SamplingParams
from steelyard.text.marks import ReasoningGate
from steelyard.text.stops import Match, StopMatcher
from steelyard.text.tokenizer import Tokenizer

_Utf8 = cast(type[codecs.BufferedIncrementalDecoder], codecs.getincrementaldecoder("utf-8"))


class Piece(NamedTuple):
    """What one call adds to an answer.

    text         to be shown now
    stop_string  the stop string that ended the answer, else None
    keep         generated tokens that belong to the text: all fed so far, or, at a stop string, those up to the one
                 that holds the last kept character
    num_shown    generated tokens no later stop string can cut off: what is told of them (ids, logprobs) may go out
    """

    text: str
    stop_string: str | None
    keep: int
    num_shown: int


class TextStream:
    """Decodes one answer. Time is linear in its length; memory beyond a few counters is the held text.

    stop                 strings that end the answer; the first to be completed wins, of several the longest
    include_stop         the stop string stays in the text
    min_tokens           a stop string completed before this many tokens is ordinary text
    skip_special_tokens  control tokens add no text
    continues            the answer continues the prompt's text: its leading space is shown (completions), and not
                         dropped as that of a text of its own (chat)
    gate                 stop strings are not looked for in the reasoning it finds
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        continues: bool = False,
        gate: ReasoningGate | None = None,
    ) -> None:
        self.gate = gate
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _Utf8("replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._drop_space = tokenizer.leading_space and not continues
        self._num_tokens = 0
        self._held = ""
        self._shown_len = 0
        # (characters of the answer, tokens they took), oldest first; only for what is not yet shown.
        self._marks: deque[tuple[int, int]] = deque([(0, 0)])
        self._ended: Piece | None = None

    @classmethod
    def for_request(
        cls,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        continues: bool = False,
        gate: ReasoningGate | None = None,
    ) -> TextStream:
        return cls(
            tokenizer,
            sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=sampling.skip_special_tokens,
            continues=continues,
            gate=gate,
        )

    def feed(self, ids: Sequence[int]) -> Piece:
        """Takes the next tokens. After a stop string, more tokens are ignored and add nothing."""
        if self._ended:
            return self._ended
        if self._matcher is None and self.gate is None:
            return self._plain(ids)
        shown = ""
        for token_id in ids:
            self._num_tokens += 1
            text = self._characters(token_id)
            if not text:
                continue
            match = self._scan(text)
            end = self._shown_len + len(self._held) + len(text)
            self._marks.append((end, self._num_tokens))
            if match:
                return self._end(shown, text, match)
            shown += self._release(text, self._matcher.held if self._matcher else 0)
        return Piece(shown, None, self._num_tokens, self._num_shown())

    def _plain(self, ids: Sequence[int]) -> Piece:
        """Without stop strings nothing is held back but half a character, and nothing of the past is looked at."""
        self._num_tokens += len(ids)
        token_bytes, hidden = self._tokenizer.token_bytes, self._hidden
        raw = b"".join([token_bytes(token_id) for token_id in ids if token_id not in hidden])
        text = raw.decode("ascii") if raw.isascii() and not self._utf8.buffer else self._utf8.decode(raw)
        if self._drop_space and text:
            self._drop_space = False
            text = text.removeprefix(" ")
        return Piece(text, None, self._num_tokens, self._num_tokens)

    def _num_shown(self) -> int:
        """A stop string begins behind what is shown, so the token with the last shown character stays for certain."""
        return self._marks[0][1] if self._matcher else self._num_tokens

    def _scan(self, text: str) -> Match | None:
        num_exempt = self.gate.take(text, self._num_tokens) if self.gate else 0
        if self._matcher is None:
            return None
        match = self._matcher.scan(text[num_exempt:], self._num_tokens >= self._min_tokens)
        return Match(match.stop, match.end + num_exempt) if match else None

    def finish(self) -> str:
        """What was held back, when an answer ends for another reason than a stop string; nothing after one.

        Half a character at the very end becomes U+FFFD here, and only here; stop strings are not looked for in it.
        """
        if self._ended:
            return ""
        text = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        self._shown_len += len(text)
        self._ended = Piece("", None, self._num_tokens, self._num_tokens)
        return text

    def _characters(self, token_id: int) -> str:
        """The characters this token completes."""
        if token_id in self._hidden:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text

    def _release(self, text: str, num_held: int) -> str:
        """Adds text to what is held and returns all but the last `num_held` characters."""
        text = self._held + text
        cut = len(text) - num_held
        self._held = text[cut:]
        self._shown_len += cut
        while self._marks[0][0] < self._shown_len:
            self._marks.popleft()
        return text[:cut]

    def _end(self, shown: str, text: str, match: Match) -> Piece:
        """The stop string ends inside `text` and may begin in what is held; it never begins in what was shown."""
        kept = (self._held + text)[: len(self._held) + match.end]
        if not self._include_stop:
            kept = kept[: len(kept) - len(match.stop)]
        end = self._shown_len + len(kept)
        keep = next(num_tokens for chars, num_tokens in self._marks if chars >= end)
        self._held = ""
        self._ended = Piece("", match.stop, keep, keep)
        return Piece(shown + kept, match.stop, keep, keep)
