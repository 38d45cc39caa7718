"""Prompts and sampling parameters from flags and JSONL lines; results as JSONL. Mistakes name line and field."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import msgspec

from steelyard.cli.values import above, real, whole
from steelyard.core.sampling import SamplingParams
from steelyard.errors import InvalidRequest

if TYPE_CHECKING:
    from steelyard.llm import RequestOutput

SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams))
KINDS = ("prompt", "messages", "token_ids")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt: `kind` says what `value` is (a text, messages, or token ids); `where` is for messages to people."""

    where: str
    kind: str
    value: Any
    sampling: SamplingParams
    id: Any = None


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int, temperature: float = 1.0) -> None:
    """Flags named as the fields of SamplingParams. `--seed` is the engine's: requests draw their seeds from it."""
    parser.set_defaults(max_tokens=max_tokens, temperature=temperature)
    group = parser.add_argument_group("sampling", argument_default=argparse.SUPPRESS)
    add = group.add_argument
    add("--max-tokens", type=whole(1), metavar="N", help=f"at most this many tokens an answer (default: {max_tokens})")
    add("--min-tokens", type=whole(0), metavar="N", help="no end of text before this many")
    add("--temperature", type=real(0), metavar="T", help=f"0: always the likeliest token (default: {temperature:g})")
    add("--top-p", type=above(0, 1), metavar="P", help="sample from the likeliest tokens that make up this much")
    add("--top-k", type=whole(-1), metavar="K", help="sample from the K likeliest tokens")
    add("--min-p", type=real(0, 1), metavar="P", help="sample from tokens at least this likely, of the likeliest")
    add("--presence-penalty", type=real(-2, 2), metavar="X", help="for tokens that were there")
    add("--frequency-penalty", type=real(-2, 2), metavar="X", help="for each time that a token was there")
    add("--repetition-penalty", type=above(0), metavar="X", help="divides the logits of tokens that were there")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add("--ignore-eos", action="store_true", help="go on after the end of text")


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given or have a default. Raises InvalidRequest for a value out of range."""
    values = {name: getattr(args, name) for name in SAMPLING_FIELDS - {"seed"} if hasattr(args, name)}
    make_sampling(values)
    return values


def make_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from plain values, as JSON has them. Raises InvalidRequest naming the field."""
    given = dict(values)
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if isinstance(given.get("logit_bias"), dict):
        try:
            given["logit_bias"] = [(int(token), bias) for token, bias in given["logit_bias"].items()]
        except ValueError:
            raise InvalidRequest("logit_bias: keys must be token ids", param="logit_bias") from None
    try:
        return msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        raise InvalidRequest(f"{path.rstrip('`')}: {what}", param=path.rstrip("`") or None) from None


def read_lines(lines: Iterable[str], name: str, defaults: Mapping[str, Any]) -> list[PromptLine]:
    """Each line that is not blank: {"prompt" | "messages" | "token_ids": ..., "id": ..., sampling fields ...}.

    `defaults` hold where a line says nothing. Raises InvalidRequest with file, line number and field.
    """
    found: list[PromptLine] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{name}:{number}"
            try:
                found.append(_read_line(line, where, defaults))
            except InvalidRequest as error:
                raise InvalidRequest(f"{where}: {error.message}", param=error.param) from None
    return found


def _read_line(line: str, where: str, defaults: Mapping[str, Any]) -> PromptLine:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"must be a JSON object, got {type(value).__name__}")
    unknown = sorted(value.keys() - SAMPLING_FIELDS - {*KINDS, "id"})
    if unknown:
        raise InvalidRequest(f"{unknown[0]}: no such field", param=unknown[0])
    kinds = [kind for kind in KINDS if kind in value]
    if len(kinds) != 1:
        raise InvalidRequest(f"must have exactly one of {', '.join(KINDS)}, got {' and '.join(kinds) or 'none'}")
    _check_prompt(kinds[0], value[kinds[0]])
    sampling = make_sampling({**defaults, **{k: v for k, v in value.items() if k in SAMPLING_FIELDS}})
    return PromptLine(where, kinds[0], value[kinds[0]], sampling, value.get("id"))


def _check_prompt(kind: str, value: Any) -> None:
    types: dict[str, Any] = {"prompt": str, "messages": list[dict[str, Any]], "token_ids": list[int]}
    try:
        msgspec.convert(value, types[kind])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{kind}: {error}", param=kind) from None


def result_line(line: PromptLine, result: RequestOutput) -> str:
    """A result as one line of JSON: the prompt as it came, and all that was answered."""
    value: dict[str, Any] = {} if line.id is None else {"id": line.id}
    value |= {line.kind: line.value, "outputs": [_choice(choice) for choice in result.outputs]}
    value["usage"] = {
        "prompt_tokens": len(result.prompt_token_ids),
        "completion_tokens": sum(len(choice.token_ids) for choice in result.outputs),
        "cached_tokens": result.cached_tokens,
    }
    if result.prompt_logprobs is not None:
        value["prompt_logprobs"] = _logprobs(result.prompt_logprobs)
    return json.dumps(value, ensure_ascii=False)


def _choice(choice: Any) -> dict[str, Any]:
    value = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        value["logprobs"] = _logprobs(choice.logprobs)
    if choice.error is not None:
        value["error"] = choice.error
    return value


def _logprobs(entries: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"logprob": entry.logprob, "top": [list(pair) for pair in entry.top]} for entry in entries]
