"""Builds the encoding half of a tokenizer from what a checkpoint has. Decoding is pieces.py's.

Two kinds of vocabulary come in GGUF metadata:
  gpt2   byte-level BPE: text is cut into words by a rule of known name (`pre`), merges are in the file
  llama  SentencePiece BPE: no words, spaces become "▁", merges follow from the tokens' scores
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from steelyard.checkpoint.entry import GgufVocabulary, TokenizerSource
from steelyard.errors import CheckpointError

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
UNDERLINE = "▁"

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_MARKS_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = f"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _MARKS_AND_SPACE
_GPT4O = (
    f"{_WORD}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_WORD}{_UPPER}+{_LOWER}*{_ENDINGS}?" + r"|\p{N}{1,3}" + _MARKS_AND_SPACE
)

# How `tokenizer.ggml.pre` cuts words. GPT2: the pattern built into ByteLevel; DIGITS: the same after single digits.
_GPT2, _DIGITS = "gpt2", "digits"
_RULES: dict[str, str] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
}
_NEVER_ABSORBING = frozenset({"<unk>", "<s>", "<|endoftext|>"})
# A whole word that is in the vocabulary is one token, whatever the merges say.
_WHOLE_WORDS_FIRST = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "tekken"}
)


def build_tokenizer(source: TokenizerSource) -> Tokenizer:
    """A `tokenizers.Tokenizer`. Raises CheckpointError for a kind or a rule it does not know, with the name."""
    if source.kind == "json":
        try:
            built = Tokenizer.from_file(str(source.path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{source.path}: not a tokenizer file: {error}") from None
        built.no_truncation()
        built.no_padding()
        return built
    if source.kind == "sentencepiece":
        raise CheckpointError(
            f"{source.path}: a SentencePiece model without tokenizer.json is not supported; "
            "convert it once (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    if source.kind not in ("gpt2", "llama") or source.vocabulary is None:
        raise CheckpointError(f"{source.path}: tokenizer kind '{source.kind}' is not supported, only gpt2 and llama")
    if source.vocabulary.normalizes:
        raise CheckpointError(f"{source.path}: a tokenizer that rewrites text (precompiled_charsmap) is not supported")
    build = _byte_level if source.kind == "gpt2" else _sentencepiece
    built = build(source, source.vocabulary)
    _add_special(built, source.vocabulary)
    return built


def _ids(source: TokenizerSource, words: GgufVocabulary) -> dict[str, int]:
    ids = {token: i for i, token in enumerate(words.tokens)}
    if len(ids) != len(words.tokens):
        twice = next(t for i, t in enumerate(words.tokens) if ids[t] != i)
        raise CheckpointError(f"{source.path}: token {twice!r} appears twice in the vocabulary")
    return ids


def _byte_level(source: TokenizerSource, words: GgufVocabulary) -> Tokenizer:
    rule = _RULES.get(words.pre or "")
    if rule is None:
        raise CheckpointError(f"{source.path}: pre-tokenizer '{words.pre}' is not supported (tokenizer.ggml.pre)")
    ids = _ids(source, words)
    merges = []
    for merge in words.merges:
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(f"{source.path}: merge {merge!r} is not of tokens in the vocabulary")
        merges.append((left, right))
    built = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=words.pre in _WHOLE_WORDS_FIRST,
        )
    )
    built.pre_tokenizer = pre_tokenizers.Sequence(_word_rule(rule))
    built.decoder = decoders.ByteLevel()
    return built


def _word_rule(rule: str) -> list[pre_tokenizers.PreTokenizer]:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in (_GPT2, _DIGITS))
    if rule == _GPT2:
        return [letters]
    if rule == _DIGITS:
        return [pre_tokenizers.Digits(individual_digits=True), letters]
    return [pre_tokenizers.Split(Regex(rule), behavior="isolated"), letters]


def _sentencepiece(source: TokenizerSource, words: GgufVocabulary) -> Tokenizer:
    ids = _ids(source, words)
    if len(words.scores) != len(words.tokens):
        raise CheckpointError(f"{source.path}: a llama vocabulary without scores (tokenizer.ggml.scores)")
    unknown = words.unknown_token_id
    built = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=derive_merges(words, ids),
            unk_token=None if unknown is None else words.tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in words.types,
        )
    )
    spaces = normalizers.Replace(" ", UNDERLINE)
    built.normalizer = (
        normalizers.Sequence([normalizers.Prepend(UNDERLINE), spaces]) if words.add_space_prefix else spaces
    )
    steps = [decoders.Replace(UNDERLINE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if words.add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    built.decoder = decoders.Sequence(steps)
    return built


def derive_merges(words: GgufVocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins, at each step, the two neighbours whose union has the highest score.

    As ranked merges: every cut of a normal token into two normal tokens, by score of the whole (ties: by id), the
    cuts of one token by the ids of left and right part.
    """
    normal = {token for token, kind in zip(words.tokens, words.types, strict=True) if kind == NORMAL}
    order = sorted((i for i, t in enumerate(words.tokens) if t in normal), key=lambda i: (-words.scores[i], i))
    merges: list[tuple[str, str]] = []
    for i in order:
        token = words.tokens[i]
        cuts = [
            (ids[token[:at]], ids[token[at:]])
            for at in range(1, len(token))
            if token[:at] in normal and token[at:] in normal
        ]
        merges += [(words.tokens[left], words.tokens[right]) for left, right in sorted(cuts)]
    return merges


def _add_special(built: Tokenizer, words: GgufVocabulary) -> None:
    """Control tokens, and those a user defined: both are found in text before anything else looks at it."""
    absorbing = {
        token
        for token, kind in zip(words.tokens, words.types, strict=True)
        if words.control_absorbs_space and kind == CONTROL and token not in _NEVER_ABSORBING
    }
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False, rstrip=token in absorbing)
        for token, kind in zip(words.tokens, words.types, strict=True)
        if kind in (CONTROL, USER_DEFINED) and token
    ]
    built.add_special_tokens([t for t in added if t.special])
    built.add_tokens([t for t in added if not t.special])
