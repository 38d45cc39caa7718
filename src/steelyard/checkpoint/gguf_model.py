"""Opens a GGUF file as a checkpoint: its parts, config, tensors, vocabulary, template and stop ids."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from steelyard.checkpoint.entry import Checkpoint, GgufVocabulary, TokenizerSource
from steelyard.checkpoint.fingerprint import fingerprint
from steelyard.checkpoint.gguf import GgufFile, GgufTensor, read_gguf
from steelyard.checkpoint.gguf_config import config_of, family_of, generation_config_of, layout_of
from steelyard.checkpoint.gguf_header import Header
from steelyard.checkpoint.gguf_names import translate
from steelyard.errors import CheckpointError

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_CONTROL = 3
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# A file names one end token; models end a turn or a text with any of these that their vocabulary has as control.
_END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|end_of_turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "_<EOT>",
    }
)
# Rules for cutting words whose models want a BOS token where the file does not say.
_BOS_BY_DEFAULT = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "tekken"}
)


def open_gguf(path: Path, name: str, with_weights: bool) -> Checkpoint:
    """Reads a file, or all parts of a split one given its first. Raises CheckpointError."""
    files = [read_gguf(p) for p in _parts(path)]
    header = Header(path, files[0].metadata, _merge(files))
    family, layout = family_of(header), layout_of(header)
    config = config_of(header, family, layout)
    tensors = translate(list(header.tensors.values()), family, layout) if with_weights else {}
    source = _tokenizer(header, config["vocab_size"])
    ends = _end_ids(header, source)
    config["bos_token_id"] = source.bos_token_id if source else None
    config["eos_token_id"] = sorted(ends)
    return Checkpoint(
        name=name,
        path=path,
        format="gguf" if with_weights else "config",
        config=config,
        tensors=tensors,
        tokenizer=source,
        chat_template=_text(header, "tokenizer.chat_template"),
        bos_token_id=source.bos_token_id if source else None,
        eos_token_ids=ends,
        fingerprint=fingerprint(config, tensors.values()),
        generation_config=generation_config_of(header),
    )


def _parts(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if not match:
        return [path]
    stem, total = match[1], int(match[3])
    parts = [path.with_name(f"{stem}-{i:05}-of-{match[3]}.gguf") for i in range(1, total + 1)]
    missing = [p.name for p in parts if not p.exists()]
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} of {total} parts are missing, the first is {missing[0]}")
    return parts


def _merge(files: list[GgufFile]) -> dict[str, tuple[Path, GgufTensor]]:
    tensors: dict[str, tuple[Path, GgufTensor]] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in tensors:
                raise CheckpointError(f"{file.path}: tensor '{tensor.name}' is also in another part")
            tensors[tensor.name] = (file.path, tensor)
    announced = files[0].metadata.get("split.tensors.count")
    if announced is not None and announced != len(tensors):
        raise CheckpointError(
            f"{files[0].path}: the parts have {len(tensors)} tensors, the first announces {announced}"
        )
    return tensors


def _tokenizer(header: Header, vocab_size: int) -> TokenizerSource | None:
    kind = _text(header, "tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    tokens = _array(header, "tokens", str)
    if len(tokens) > vocab_size:
        raise CheckpointError(f"{header.path}: has {len(tokens)} tokens and an embedding of {vocab_size} rows")
    pre = _text(header, "tokenizer.ggml.pre")
    vocabulary = GgufVocabulary(
        tokens=tokens,
        types=_array(header, "token_type", int, len(tokens)) or [1] * len(tokens),
        scores=_array(header, "scores", float, len(tokens)),
        merges=_array(header, "merges", str),
        pre=pre,
        add_space_prefix=bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True)),
        unknown_token_id=_id(header, "unknown_token_id", len(tokens)),
        control_absorbs_space=header.arch == "phi3" and kind == "llama",
        normalizes=bool(header.metadata.get("tokenizer.ggml.precompiled_charsmap")),
    )
    bos, eos = (_id(header, key, len(tokens)) for key in ("bos_token_id", "eos_token_id"))
    add_bos = header.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _BOS_BY_DEFAULT)
    return TokenizerSource(
        kind=kind,
        path=header.path,
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        bos_token_id=bos,
        add_bos=bool(add_bos) and bos is not None,
        vocabulary=vocabulary,
    )


def _array(header: Header, key: str, kind: type, length: int | None = None) -> list[Any]:
    values = header.metadata.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(values, list) or not all(type(v) is kind for v in values):
        raise CheckpointError(f"{header.path}: metadata 'tokenizer.ggml.{key}' is not an array of {kind.__name__}")
    if length is not None and values and len(values) != length:
        raise CheckpointError(
            f"{header.path}: metadata 'tokenizer.ggml.{key}' has {len(values)} entries for {length} tokens"
        )
    return values


def _id(header: Header, key: str, num_tokens: int) -> int | None:
    value = header.metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, int) and 0 <= value < num_tokens else None


def _text(header: Header, key: str) -> str | None:
    value = header.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{header.path}: metadata '{key}' is not a string")
    return value


def _end_ids(header: Header, source: TokenizerSource | None) -> frozenset[int]:
    if source is None or source.vocabulary is None:
        return frozenset()
    words = source.vocabulary
    named = {_id(header, key, len(words.tokens)) for key in _END_KEYS} - {None}
    known = {i for i, t in enumerate(words.types) if t == _CONTROL and words.tokens[i] in _END_TEXTS}
    return frozenset(i for i in named | known if i is not None)
