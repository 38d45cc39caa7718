"""How the tokens of one request are chosen and when it ends. Validation of values lives here, and only here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from steelyard.errors import InvalidRequest

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_LOGIT_BIAS = 1024
SEED_BITS = 64
INT32_MAX = 2**31 - 1
"""Counts and token ids travel to the device as int32."""
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it in float32."""

VALUE_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),  # without 0 itself
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 10.0),
}
COUNT_RANGES = {
    "n": (1, MAX_N),
    "max_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "top_k": (-1, INT32_MAX),
    "seed": (-(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
}
"""Of a value that is given. `min_tokens` is at most `max_tokens`."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an output is held to: exactly one of them. `grammar` is Lark, in llguidance's dialect.

    Raises InvalidRequest if none or more than one is given.
    """

    json: Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [self.json is not None, self.json_object, self.regex is not None, self.choice is not None]
        if sum([*given, self.grammar is not None]) != 1:
            raise InvalidRequest("structured_outputs: exactly one kind must be given", param="structured_outputs")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a client asked of sampling. Frozen; `validate` raises InvalidRequest naming the field.

    max_tokens    None: as many as context and KV pool allow
    top_k         0 or -1: off
    seed          None: the engine picks one; choice i of n uses seed + i
    logprobs      None: none; k >= 0: the chosen token's and the k best (natural log, after no transformation
                  of the logits but temperature 1: the model's own distribution)
    prompt_logprobs  the same for prompt tokens; such a request reads no cached prefix
    logit_bias    ((token id, bias added to the logit), ...)
    structured_outputs  what the output is held to, for the offline engine; a server sends a checked grammar instead
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        for name, (low, high) in VALUE_RANGES.items():
            _in_range(name, getattr(self, name), low, high, low_open=name == "top_p")
        for _, bias in self.logit_bias:
            _in_range("logit_bias", bias, -100.0, 100.0)
        for text in self.stop:
            if not text or len(text) > MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"stop: each string must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}",
                    param="stop",
                )

    def _check_counts(self) -> None:
        for name, (low, high) in COUNT_RANGES.items():
            value = getattr(self, name)
            if value is not None:
                _int_in_range(name, value, low, high)
        if self.max_tokens is not None:
            _int_in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _int_in_range("stop", len(self.stop), 0, MAX_STOP_STRINGS, what="number of strings")
        _int_in_range("logit_bias", len(self.logit_bias), 0, MAX_LOGIT_BIAS, what="number of entries")

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InvalidRequest if a token id named by these parameters is outside [0, vocab_size)."""
        named = [("stop_token_ids", i) for i in self.stop_token_ids] + [("logit_bias", i) for i, _ in self.logit_bias]
        for name, token in named:
            _int_in_range(name, token, 0, vocab_size - 1, what="token id")

    @property
    def greedy(self) -> bool:
        """True where the argmax is taken. A temperature too small to divide by in float32 is greedy too."""
        return self.temperature < 1e-5

    def for_choice(self, index: int, seed: int) -> SamplingParams:
        """The parameters of choice `index` alone: n = 1 and a definite seed (modulo 2^64)."""
        return replace(self, n=1, seed=(seed + index) % 2**SEED_BITS)


def _in_range(name: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    ok = math.isfinite(value) and (low < value if low_open else low <= value) and value <= high
    if not ok:
        bracket = "(" if low_open else "["
        raise InvalidRequest(f"{name}: must be a number in {bracket}{low:g}, {high:g}], got {value!r}", param=name)


def _int_in_range(name: str, value: int, low: int, high: int | None, what: str = "value") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name}: {what} must be an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name}: {what} must be {limit}, got {value}", param=name)
