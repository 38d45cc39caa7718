"""Log-probabilities in the two shapes of the OpenAI API: arrays for completions, objects for chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from steelyard.text.tokenizer import Tokenizer
from steelyard.wire.messages import Logprob

LOWEST = -9999.0
"""What JSON gets for minus infinity, as OpenAI writes it."""


class TokenNames:
    """How single tokens are written. Without a tokenizer a token is `token_id:7`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def raw(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        return self._tokenizer.token_bytes(token)

    def text(self, token: int) -> str:
        r"""The token's text; bytes that are no text alone come as `bytes:\xf0\x9f`."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


class CompletionLogprobs:
    """The arrays of /v1/completions, growing. `text_offset` counts characters of the token texts before."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def of(self, ids: Sequence[int], logprobs: Iterable[Logprob | None]) -> dict[str, list[Any]]:
        """The object for `ids`; a None among `logprobs` is a token without one (a prompt's first)."""
        tokens: list[str] = []
        chosen: list[float | None] = []
        best: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, entry in zip(ids, logprobs):
            text = self._names.text(token)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            chosen.append(None if entry is None else finite(entry.logprob))
            best.append(None if entry is None else self._best(token, entry))
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": offsets}

    def _best(self, token: int, entry: Logprob) -> dict[str, float]:
        """The k best, and the chosen token if it is not among them. Of two ids with one text the better stays."""
        best: dict[str, float] = {}
        for other, logprob in [*entry.top, (token, entry.logprob)]:
            best.setdefault(self._names.text(other), finite(logprob))
        return best


def prompt_logprobs(
    names: TokenNames, ids: Sequence[int], logprobs: Sequence[Logprob], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's list: None for a prompt's first token, then its id and the `num_top` best, each with its text.

    `rank` counts from 1; it is null for a token that is not among the best that are known.
    """
    found: list[dict[str, Any] | None] = [None]
    for token, entry in zip(ids[1:], logprobs):
        ranked = {other: (logprob, rank) for rank, (other, logprob) in enumerate(entry.top[:num_top], 1)}
        ranked.setdefault(token, (entry.logprob, None))  # type: ignore[arg-type]
        found.append(
            {
                str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": names.text(other)}
                for other, (logprob, rank) in ranked.items()
            }
        )
    return found


def chat_logprobs(names: TokenNames, ids: Sequence[int], logprobs: Sequence[Logprob]) -> dict[str, Any]:
    """The object of /v1/chat/completions."""
    return {
        "content": [
            {
                **_entry(names, token, entry.logprob),
                "top_logprobs": [_entry(names, other, logprob) for other, logprob in entry.top],
            }
            for token, entry in zip(ids, logprobs)
        ]
    }


def _entry(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    return {"token": names.text(token), "logprob": finite(logprob), "bytes": list(names.raw(token))}
