"""What a checkpoint is, as plain values: where each tensor lies, what the config says, how text becomes tokens.

Nothing here reads a file, and nothing knows torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its bytes lie at [offset, offset + nbytes) of `file`, little-endian, rows last to first dimension.

    name            the Hugging Face parameter name
    kind            "F32", "F16", "BF16", "I64", ... or a GGUF block format ("Q4_1", "Q6_K", ...)
    shape           in torch order: the last dimension is contiguous, and is the one blocks run along
    source_name     the name inside the file, for messages
    permuted_heads  not None: within each of that many heads the rows are stored (0, 1, 2, ...) = (first half's 0,
                    second half's 0, first half's 1, ...), the order of interleaved rotary pairs; undo on loading
    added           a constant the file adds to every value (Gemma's norm weights in GGUF: 1); subtract on loading
    """

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    source_name: str
    permuted_heads: int | None = None
    added: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What a tokenizer is built from, and what the model's files say about its use.

    kind     "json" (a tokenizer.json, in `path`), "gpt2" or "llama" (vocabulary in a GGUF's metadata: `vocabulary`),
             "sentencepiece" (a tokenizer.model without a tokenizer.json, which cannot be read)
    add_bos  True or False: whether text gets the BOS token in front; None: as the tokenizer.json's own
             post-processor says
    """

    kind: str
    path: Path
    bos_token: str | None = None
    eos_token: str | None = None
    bos_token_id: int | None = None
    add_bos: bool | None = None
    vocabulary: GgufVocabulary | None = None


@dataclass(frozen=True, slots=True, repr=False)
class GgufVocabulary:
    """The tokenizer arrays of a GGUF's metadata, by token id, as stored.

    types   1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
    scores  of kind "llama": the higher, the earlier a pair merges into this token
    merges  of kind "gpt2": "left right", best first
    pre     of kind "gpt2": the name of the rule that cuts text into words
    control_absorbs_space  a control token takes the white space after it along (Phi-3's chat markers)
    normalizes             text is rewritten by a table before it is cut (kinds that cannot be read)
    """

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    pre: str | None
    add_space_prefix: bool
    unknown_token_id: int | None
    control_absorbs_space: bool = False
    normalizes: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model found and read up to, not including, its weights.

    name            what to call it where the user has not: the given name or id, or the last part of a path
    path            the directory or file
    format          "safetensors" | "gguf" | "config" (no weights: for random ones)
    config          keys and values of a Hugging Face config.json; GGUF metadata is translated into them
    tensors         by Hugging Face parameter name
    eos_token_ids   every id that ends a text: union of generation config, config and tokenizer
    fingerprint     hex SHA-256 of config, tensor table and a sample of each tensor's bytes: differs where the
                    model differs, whatever the files are called
    """

    name: str
    path: Path
    format: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    tokenizer: TokenizerSource | None
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    fingerprint: str
    generation_config: Mapping[str, Any] = field(default_factory=dict)
