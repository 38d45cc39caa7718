from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import regex as re
import sentencepiece as spm
import transformers

from steelyard.checkpoint.entry import Checkpoint, GgufVocabulary, TokenizerSource
from steelyard.checkpoint.find import open_checkpoint
from steelyard.errors import CheckpointError, InvalidRequest
from steelyard.text.pieces import byte_letters
from steelyard.text.tokenizer import Tokenizer
from tests.text.samples import varied

# Checked by hand against the rule of this vocabulary: single digits first, then GPT-2's words. The white space
# before a digit stays together, which a reader that knows only GPT-2's rule gets wrong.
BY_HAND = {
    "Hello  12 world": ["Hello", "  ", "1", "2", " world"],
    "  12": ["  ", "1", "2"],
    "x = 3.14": ["x", " =", " ", "3", ".", "1", "4"],
    "don't": ["don", "'t"],
    "<|im_start|>user\nhi<|im_end|>": ["<|im_start|>", "user", "\n", "hi", "<|im_end|>"],
    "a  b": ["a", " ", " b"],
    "": [],
}


@pytest.mark.parametrize("text", BY_HAND)
def test_smollm2_cuts_as_checked_by_hand(byte_level: Tokenizer, text: str) -> None:
    assert [byte_level.token_text(i) for i in byte_level.encode(text)] == BY_HAND[text]


def test_smollm2_digits_stand_alone(byte_level: Tokenizer) -> None:
    seen = 0
    for text in varied(600):
        for i in byte_level.encode(text):
            shown = byte_level.token_text(i)
            if any(c in "0123456789" for c in shown):
                assert len(shown) == 1, (text, shown)
                seen += 1
    assert seen > 300


class PlainEncoder:
    """The slow twin: special tokens, then single digits, then GPT-2's words, then the best merge until none is left."""

    WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, words: GgufVocabulary) -> None:
        self.ids = {token: i for i, token in enumerate(words.tokens)}
        self.rank = {tuple(merge.split(" ")): i for i, merge in enumerate(words.merges)}
        self.letter = {b: c for c, b in byte_letters().items()}
        self.special = {t for t, kind in zip(words.tokens, words.types, strict=True) if kind == 3}
        self.cut = re.compile("(" + "|".join(map(re.escape, sorted(self.special))) + ")")

    def encode(self, text: str) -> list[int]:
        out = []
        for part in self.cut.split(text):
            if part in self.special:
                out.append(self.ids[part])
                continue
            for piece in re.split(r"(\p{N})", part):
                for word in self.WORDS.findall(piece):
                    out += [self.ids[s] for s in self.merged(word) if s in self.ids]
        return out

    def merged(self, word: str) -> list[str]:
        symbols = [self.letter[b] for b in word.encode()]
        while pairs := [p for p in itertools.pairwise(symbols) if p in self.rank]:
            best = min(pairs, key=self.rank.__getitem__)
            at = next(i for i, pair in enumerate(itertools.pairwise(symbols)) if pair == best)
            symbols[at : at + 2] = ["".join(best)]
        return symbols


def test_smollm2_equals_a_plain_byte_pair_encoder_on_2000_strings(byte_level: Tokenizer, smollm2: Checkpoint) -> None:
    assert smollm2.tokenizer and smollm2.tokenizer.vocabulary
    plain = PlainEncoder(smollm2.tokenizer.vocabulary)
    extra = ("<|im_start|>", "<|im_end|>", "<|im_", "Ⅷ", "½ ", "  7", "\x06", "\x85")
    for text in varied(2000, seed=21, extra=extra):
        assert byte_level.encode(text) == plain.encode(text), text


def test_byte_level_decoding_gives_the_text_back(byte_level: Tokenizer) -> None:
    for text in varied(1000, extra=("<|im_start|>", "<|im_end|>", "<|im_")):
        assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text


def test_a_text_can_be_no_token_at_all(byte_level: Tokenizer) -> None:
    assert byte_level.encode("\x06") == []


def test_decoding_equals_the_librarys_on_every_single_token(byte_level: Tokenizer, spaced: Tokenizer) -> None:
    for tokenizer in (byte_level, spaced):
        for i in range(tokenizer.vocab_size):
            expected = tokenizer._encoder.decode([i], skip_special_tokens=False)
            assert tokenizer.decode([i], skip_special_tokens=False) == expected, i


def test_tokenizer_json_is_read_as_transformers_reads_it(byte_level: Tokenizer, tmp_path: Path) -> None:
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level._encoder, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    found = open_checkpoint(str(tmp_path), "dummy")
    ours = Tokenizer.from_checkpoint(found)
    assert found.eos_token_ids == {0, 2}
    assert found.bos_token_id == ours.bos_token_id == 1
    for text in varied(300, seed=1, extra=("<|im_start|>", "<|im_end|>")):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_sentencepiece_kinds_agree_with_sentencepiece(
    spm_pair: tuple[spm.SentencePieceProcessor, Tokenizer],
) -> None:
    owner, ours = spm_pair
    control = ("<s>", "</s>", "<unk>")
    for text in varied(2000, seed=2, extra=("   ", "\n\n", "\t", "<div>", "      ")):
        if any(c in text for c in control) or "▁" in text:
            continue  # special tokens in text are ours to read, and "▁" is a space to SentencePiece
        ids = owner.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == owner.decode(ids) == text


def test_bos_is_added_once(spaced: Tokenizer) -> None:
    bos = spaced.bos_token_id
    assert bos is not None
    assert spaced.encode("hi")[0] == bos
    assert spaced.encode("hi", add_special_tokens=False)[0] != bos
    assert spaced.encode("<s>hi").count(bos) == 1
    assert spaced.encode("<s>hi", add_special_tokens=False).count(bos) == 1
    assert spaced.encode("") == [bos]


@pytest.mark.parametrize("setting", [None, True, False])
def test_bos_of_a_tokenizer_json_follows_its_config(spaced: Tokenizer, tmp_path: Path, setting: bool | None) -> None:
    """None: the file's own post-processor decides."""
    state = json.loads(spaced.to_json())
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    config = {"bos_token": {"content": "<s>"}} | ({} if setting is None else {"add_bos_token": setting})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours = Tokenizer.from_checkpoint(open_checkpoint(str(tmp_path), "dummy"))
    expected = 0 if setting is False else 1
    assert ours.encode("hi").count(1) == expected
    assert ours.encode("<s>hi").count(1) == 1
    assert ours.encode("hi", add_special_tokens=False).count(1) == 0


def test_ids_outside_the_vocabulary_are_refused_and_named(byte_level: Tokenizer) -> None:
    for bad in (-1, byte_level.vocab_size, 10**9):
        with pytest.raises(InvalidRequest, match=str(bad)):
            byte_level.decode([5, bad])
    assert byte_level.token_bytes(byte_level.vocab_size) == b""


def test_half_a_surrogate_pair_is_a_clients_mistake(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level.encode("a\ud800b")


def test_no_encoding_is_shorter_than_the_bound(byte_level: Tokenizer) -> None:
    close = 0
    for text in [*varied(300), " " * 4000, "=" * 4000, "-" * 4000]:
        num, bound = len(byte_level.encode(text)), byte_level.fewest_tokens(text)
        assert bound <= num
        close += bound > 40 and num < 3 * bound
    assert close, "no string comes near the bound, so it says nothing"


def test_an_unknown_rule_for_words_is_an_error_with_its_name(smollm2: Checkpoint) -> None:
    assert smollm2.tokenizer and smollm2.tokenizer.vocabulary
    odd = replace(smollm2.tokenizer, vocabulary=replace(smollm2.tokenizer.vocabulary, pre="martian"))
    with pytest.raises(CheckpointError, match="'martian'"):
        Tokenizer(odd)


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "sentencepiece"])
def test_other_kinds_of_tokenizer_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="SentencePiece" if kind == "sentencepiece" else f"'{kind}'"):
        Tokenizer(TokenizerSource(kind, tmp_path / "tokenizer.model"))


def test_a_damaged_tokenizer_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(TokenizerSource("json", path))
