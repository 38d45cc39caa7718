"""Rules for words and merges, against transformers' reading of the same metadata where it knows the rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

from steelyard.checkpoint.entry import GgufVocabulary, TokenizerSource
from steelyard.errors import CheckpointError
from steelyard.text.build import _RULES, build_tokenizer, derive_merges
from steelyard.text.tokenizer import Tokenizer
from tests.text.samples import varied

CORPUS = [*varied(400, seed=11), *("don't we'll HE'S 12345 67 The cat, the Cat's  hat\n\n  x" for _ in range(20))]


@pytest.fixture(scope="module")
def vocabulary() -> GgufVocabulary:
    """Merges across every kind of border, so that each rule cuts differently: learned from text not cut at all."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([c for text in CORPUS for c in (text, text[:7], text[3:11])], trainer)
    ids = backend.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    # Every union of two tokens is a merge, in the order learned.
    merges = [f"{t[:at]} {t[at:]}" for t in tokens for at in range(1, len(t)) if t[:at] in ids and t[at:] in ids]
    return GgufVocabulary(
        tokens=[*tokens, "<|end|>", "<mark>"],
        types=[1] * len(tokens) + [3, 4],
        scores=[],
        merges=merges,
        pre=None,
        add_space_prefix=False,
        unknown_token_id=None,
    )


def made(vocabulary: GgufVocabulary, pre: str) -> Backend:
    return build_tokenizer(TokenizerSource("gpt2", Path("m.gguf"), vocabulary=replace(vocabulary, pre=pre)))


KNOWN_TO_BOTH = sorted((set(_RULES) & set(theirs.GGUF_PRE_TOKENIZER_SPLITS)) | {"gpt-2"})


@pytest.mark.parametrize("pre", KNOWN_TO_BOTH)
def test_words_are_cut_as_transformers_cuts_them(vocabulary: GgufVocabulary, pre: str) -> None:
    ours = made(vocabulary, pre)
    metadata = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": pre,
        "tokens": vocabulary.tokens,
        "token_type": vocabulary.types,
        "merges": vocabulary.merges,
    }
    other, _ = theirs.convert_gguf_tokenizer("llama", metadata)
    for text in varied(250, seed=12, extra=("<|end|>", "<mark>", "We'LL", "１２３٤", "ǅa", "a\u0301b")):
        assert ours.pre_tokenizer.pre_tokenize_str(text) == other.pre_tokenizer.pre_tokenize_str(text)
        if not ours.model.ignore_merges:
            assert ours.encode(text).ids == other.encode(text, add_special_tokens=False).ids, text


def test_every_rule_is_a_rule_of_its_own(vocabulary: GgufVocabulary) -> None:
    text = "don't WE'LL 1234567 \n\n  HTTPServer camelCase/\n x  9 ½ a\u0301b\u0301"
    cuts = {}
    for pre, rule in _RULES.items():
        pieces = made(vocabulary, pre).pre_tokenizer.pre_tokenize_str(text)
        assert "".join(text[a:b] for _, (a, b) in pieces) == text
        cuts.setdefault(rule, set()).add(tuple(span for _, span in pieces))
    assert all(len(ways) == 1 for ways in cuts.values())
    assert len({next(iter(ways)) for ways in cuts.values()}) == len(cuts) == 7


def test_a_whole_word_in_the_vocabulary_wins_where_the_family_says_so(vocabulary: GgufVocabulary) -> None:
    words = replace(vocabulary, merges=[])
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        assert (len(made(words, pre).encode("cat").ids) == 1) is (whole and "cat" in words.tokens)
    assert "cat" in words.tokens


def test_a_merge_of_unknown_tokens_is_named(vocabulary: GgufVocabulary) -> None:
    for merge in ("zz qq", "nospace"):
        with pytest.raises(CheckpointError, match=f"merge '{merge}'"):
            made(replace(vocabulary, merges=[*vocabulary.merges, merge]), "gpt-2")


def test_a_token_twice_is_named(vocabulary: GgufVocabulary) -> None:
    twice = replace(vocabulary, tokens=[*vocabulary.tokens, "<mark>"], types=[*vocabulary.types, 1])
    with pytest.raises(CheckpointError, match="'<mark>' appears twice"):
        made(twice, "gpt-2")


def spaced_words(**changes: object) -> GgufVocabulary:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "aa", "aab", "▁a", "<|end|>", "\n"]
    words = GgufVocabulary(
        tokens=tokens,
        types=[2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 3, 1],
        scores=[0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0, 0.0, -9.0],
        merges=[],
        pre=None,
        add_space_prefix=True,
        unknown_token_id=0,
    )
    return replace(words, **changes)


def test_merges_follow_from_scores_and_cuts_of_one_token_from_ids() -> None:
    words = spaced_words(tokens=["aa", "ab", "b", "a", "aab"], types=[1] * 5, scores=[-1.0, -2.0, -9.0, -9.0, -3.0])
    ids = {t: i for i, t in enumerate(words.tokens)}
    assert derive_merges(words, ids) == [("a", "a"), ("a", "b"), ("aa", "b"), ("a", "ab")]


def spaced_source(words: GgufVocabulary) -> TokenizerSource:
    return TokenizerSource("llama", Path("m.gguf"), "<s>", "</s>", 1, True, words)


def test_control_tokens_in_text_come_whole_and_text_after_them_begins_anew() -> None:
    tokenizer = Tokenizer(spaced_source(spaced_words()))
    assert tokenizer.encode("ab<|end|>a</s>") == [1, 3, 6, 10, 9, 2]
    assert tokenizer.decode([3, 6, 10, 9, 2], skip_special_tokens=False) == "ab<|end|> a</s>"
    assert tokenizer.decode([3, 6, 10, 9, 2]) == "ab a"


def test_phi3_markers_take_the_white_space_after_them_along() -> None:
    absorbing = Tokenizer(spaced_source(spaced_words(control_absorbs_space=True)))
    plain = Tokenizer(spaced_source(spaced_words()))
    assert absorbing.encode("<|end|>\na") == [1, 10, 9]
    assert plain.encode("<|end|>\na") == [1, 10, 3, 11, 4]
    assert absorbing.encode("<s> a") == [1, 3, 9]


def test_a_vocabulary_that_rewrites_text_or_has_no_scores_is_refused() -> None:
    with pytest.raises(CheckpointError, match="precompiled_charsmap"):
        Tokenizer(spaced_source(spaced_words(normalizes=True)))
    with pytest.raises(CheckpointError, match="without scores"):
        Tokenizer(spaced_source(spaced_words(scores=[])))
