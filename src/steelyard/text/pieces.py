"""What each token id adds to a text, as bytes: decoding one token at a time or a thousand at once is the same.

A tokenizer's decoder is read once and turned into a table. Text is then the concatenation of entries, decoded as
UTF-8, less a leading space where the vocabulary puts one before a text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from steelyard.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, repr=False)
class Pieces:
    """`by_id[i]` is what id i adds, empty for ids without a token; `leading_space`: a text's first space is dropped."""

    by_id: list[bytes]
    leading_space: bool


def pieces_of(tokenizer: Tokenizer, where: str) -> Pieces:
    """The table of a tokenizer. Raises CheckpointError for a decoder it does not know, with the name."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        tokens[i] = token
    steps = _steps(tokenizer)
    kinds = [s["type"] for s in steps]
    if not kinds:  # the library joins with spaces
        return Pieces([f" {t}".encode() if t else b"" for t in tokens], leading_space=True)
    if kinds == ["ByteLevel"]:
        letters = byte_letters()
        return Pieces([_from_letters(t, letters) for t in tokens], leading_space=False)
    return _spaced(steps, tokens, where)


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary: printable Latin-1 for itself, then from U+0100.

    Radford et al. 2019 (GPT-2): every byte gets a visible character, so that tokens are strings.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    return letters | {chr(256 + i): b for i, b in enumerate(others)}


def _from_letters(token: str, letters: dict[str, int]) -> bytes:
    """A token with any other character in it was added as plain text."""
    try:
        return bytes([letters[c] for c in token])
    except KeyError:
        return token.encode()


def _spaced(steps: list[dict[str, Any]], tokens: list[str], where: str) -> Pieces:
    """Vocabularies of SentencePiece: a mark for spaces, `<0xNN>` for bytes, perhaps a space before each text."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = leading_space = False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
            leading_space = step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step["content"] == " " and step["start"] <= 1 and not step["stop"]:
            leading_space = step["start"] == 1
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind != "Fuse":
            raise CheckpointError(f"{where}: the tokenizer's decoder '{kind}' is not supported")

    def piece(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return Pieces([piece(t) for t in tokens], leading_space)
