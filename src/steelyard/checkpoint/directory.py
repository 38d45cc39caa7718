"""Opens a directory in Hugging Face's layout as a checkpoint: JSON files beside safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from steelyard.checkpoint import safetensors
from steelyard.checkpoint.entry import Checkpoint, TensorEntry, TokenizerSource
from steelyard.checkpoint.fingerprint import fingerprint
from steelyard.errors import CheckpointError

CONFIG = "config.json"


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _TokenizerJson(msgspec.Struct):
    model: _Vocabulary


def open_directory(directory: Path, name: str, with_weights: bool) -> Checkpoint:
    """Reads config, tokenizer files and, unless without weights, the tensor table. Raises CheckpointError."""
    config = read_json(directory / CONFIG)
    if config is None:
        raise CheckpointError(f"{directory}: has no {CONFIG}")
    if not isinstance(config.get("model_type"), str) and not config.get("architectures"):
        raise CheckpointError(f"{directory / CONFIG}: names neither model_type nor architectures")
    tensors: dict[str, TensorEntry] = {}
    if with_weights:
        refuse_quantized(directory / CONFIG, config)
        tensors = safetensors.read_directory(directory)
    generation = read_json(directory / "generation_config.json") or {}
    tokenizer_config = read_json(directory / "tokenizer_config.json") or {}
    source, end_of_tokenizer = _tokenizer(directory, tokenizer_config)
    configs = (generation, config, _nested(config))
    ends = {i for c in configs for i in _ids(c.get("eos_token_id"))} | end_of_tokenizer
    begins = [i for c in configs for i in _ids(c.get("bos_token_id"))]
    bos = source.bos_token_id if source and source.bos_token_id is not None else next(iter(begins), None)
    return Checkpoint(
        name=name,
        path=directory,
        format="safetensors" if with_weights else "config",
        config=config,
        tensors=tensors,
        tokenizer=source,
        chat_template=_chat_template(directory, tokenizer_config),
        bos_token_id=bos,
        eos_token_ids=frozenset(ends),
        fingerprint=fingerprint(config, tensors.values()),
        generation_config=generation,
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return value


def refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    """Checkpoints with quantised weights in safetensors (AWQ, GPTQ, FP8, bitsandbytes, ...) cannot be loaded."""
    quantization = config.get("quantization_config") or _nested(config).get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else "unnamed"
        raise CheckpointError(
            f"{path}: weights quantised by '{method}' are not supported; use the unquantised checkpoint or a GGUF"
        )


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a multimodal model's config."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if type(v) is int and v >= 0]


def _tokenizer(directory: Path, settings: Mapping[str, Any]) -> tuple[TokenizerSource | None, set[int]]:
    """The source, and the id of the tokenizer's own end token (empty if it has none)."""
    path = directory / "tokenizer.json"
    if not path.exists():
        pieces = directory / "tokenizer.model"
        return (TokenizerSource("sentencepiece", pieces) if pieces.exists() else None), set()
    bos, eos = _content(settings.get("bos_token")), _content(settings.get("eos_token"))
    ids = _token_ids(path, settings, {t for t in (bos, eos) if t})
    add_bos = settings.get("add_bos_token")
    source = TokenizerSource(
        kind="json",
        path=path,
        bos_token=bos,
        eos_token=eos,
        bos_token_id=ids.get(bos) if bos else None,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )
    return source, {ids[eos]} if eos and eos in ids else set()


def _content(token: Any) -> str | None:
    """A special token is given as a string, or as an object with its text under `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _token_ids(path: Path, settings: Mapping[str, Any], wanted: set[str]) -> dict[str, int]:
    """Ids of a few tokens, from the first file that has them; the large vocabulary is read only as a last resort."""
    decoder = settings.get("added_tokens_decoder")
    pairs = decoder.items() if isinstance(decoder, dict) else ()
    found = {text: int(i) for i, token in pairs if i.isdigit() and (text := _content(token))}
    try:
        raw = path.read_bytes() if not wanted <= found.keys() else b""
        if raw:
            found |= {t.content: t.id for t in msgspec.json.decode(raw, type=_AddedTokens).added_tokens}
        if not wanted <= found.keys():
            vocab = msgspec.json.decode(raw, type=_TokenizerJson).model.vocab
            found |= vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
    except (msgspec.DecodeError, OSError) as error:
        raise CheckpointError(f"{path}: not a tokenizer file: {error}") from None
    return {t: found[t] for t in wanted if t in found}


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own wins over tokenizer_config.json; of several named templates, the one called default."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None:
        template = (read_json(directory / "chat_template.json") or {}).get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
