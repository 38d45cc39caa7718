from __future__ import annotations

import random

import pytest
import sentencepiece as spm
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.sampling import SamplingParams
from steelyard.text.stream import Piece, TextStream
from steelyard.text.tokenizer import Tokenizer
from tests.text.samples import varied
from tests.text.test_stops import first_completed

SPECIAL = ("<|im_start|>", "<|im_end|>")


def run(stream: TextStream, ids: list[int], step: int = 1) -> tuple[str, Piece]:
    """The whole text and the last piece, fed `step` tokens at a time."""
    text, piece = "", Piece("", None, 0, 0)
    for at in range(0, len(ids), step):
        piece = stream.feed(ids[at : at + step])
        text += piece.text
        assert not piece.text.endswith("\ufffd")
        if piece.stop_string is not None:
            break
    return text + stream.finish(), piece


def each_character(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids that spell a text in the smallest pieces the vocabulary has: one byte or character a token."""
    return [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]


def each_byte(tokenizer: Tokenizer, text: str) -> list[int]:
    of_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [of_byte[bytes([b])] for b in text.encode()]


@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_token_by_token_equals_the_librarys_decoding(byte_level: Tokenizer, skip: bool) -> None:
    split_characters = 0
    for text in varied(2000, seed=3, extra=SPECIAL):
        ids = byte_level.encode(text)
        got, _ = run(TextStream(byte_level, skip_special_tokens=skip), ids)
        assert got == byte_level._encoder.decode(ids, skip_special_tokens=skip)
        split_characters += any("\ufffd" in byte_level.token_text(i) for i in ids)
    assert split_characters > 100


def test_sentencepiece_token_by_token_equals_its_owners_decoding(
    spm_pair: tuple[spm.SentencePieceProcessor, Tokenizer],
) -> None:
    owner, ours = spm_pair
    byte_tokens = 0
    for text in varied(2000, seed=4):
        if "<" in text or "▁" in text:
            continue
        ids = owner.encode(text)
        got, _ = run(TextStream(ours), ids)
        assert got == owner.decode(ids) == ours._encoder.decode(ids)
        byte_tokens += sum(owner.is_byte(i) for i in ids)
    assert byte_tokens > 100


def test_random_ids_stream_to_what_decoding_them_at_once_gives(byte_level: Tokenizer, spaced: Tokenizer) -> None:
    """Invalid bytes in any order: pieces concatenate to the one-shot text, replacement characters and all."""
    rng, broken = random.Random(5), 0
    for tokenizer in (byte_level, spaced):
        letters = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
        for _ in range(300):
            pool = letters if rng.random() < 0.5 else range(tokenizer.vocab_size)
            ids = [rng.choice(pool) for _ in range(rng.randint(0, 30))]
            for skip in (True, False):
                stream = TextStream(tokenizer, skip_special_tokens=skip)
                got = "".join(stream.feed([i]).text for i in ids) + stream.finish()
                assert got == tokenizer.decode(ids, skip_special_tokens=skip)
            broken += "\ufffd" in got
            if tokenizer is byte_level:
                assert got == tokenizer._encoder.decode(ids, skip_special_tokens=False)
    assert broken > 100


def test_d07_characters_of_many_bytes_come_whole(byte_level: Tokenizer, spaced: Tokenizer) -> None:
    for tokenizer in (byte_level, spaced):
        for text in ("👍🏽 ok", "👩‍👩‍👧", "漢字", "क्षत्रिय"):
            ids = each_byte(tokenizer, text)
            stream = TextStream(tokenizer, continues=True)
            pieces = [stream.feed([i]).text for i in ids]
            assert all("\ufffd" not in p for p in pieces)
            assert "" in pieces
            assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, continues=True) == text


def test_half_a_character_at_the_end_is_one_replacement_character(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok 👍")[:-1]
    stream = TextStream(byte_level)
    assert "".join(stream.feed([i]).text for i in ids) == "ok "
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_d01_no_part_of_a_stop_string_is_ever_shown(byte_level: Tokenizer) -> None:
    ids = each_character(byte_level, "one two STOP three")
    for step in (1, 2, 5, 100):
        text, piece = run(TextStream(byte_level, ("STOP",)), ids, step)
        assert text == "one two "
        assert piece.stop_string == "STOP"
        assert piece.keep == len("one two ")


def test_d03_text_held_back_comes_when_generation_ends(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, ("abc",))
    assert stream.feed(each_character(byte_level, "xyz ab")).text == "xyz "
    assert stream.finish() == "ab"


def test_d05_a_stop_string_and_what_follows_in_one_step_end_once(byte_level: Tokenizer) -> None:
    ids = [*each_character(byte_level, "hi END"), 2, 2, *byte_level.encode("more")]
    stream = TextStream(byte_level, ("END",))
    piece = stream.feed(ids)
    assert piece == Piece("hi ", "END", 3, 3)
    assert stream.feed(byte_level.encode("more")) == Piece("", "END", 3, 3)
    assert stream.finish() == ""


def test_what_was_told_of_tokens_is_never_cut_off(byte_level: Tokenizer) -> None:
    """Tokens of one to six characters against stop strings that begin and end inside them."""
    ids = byte_level.encode("one world and the words of two worlds: one word more")
    for stop in (" wor", "orlds", "s:", "s: o", "zz", "ds"):
        stream, told = TextStream(byte_level, (stop,)), 0
        for token in ids:
            piece = stream.feed([token])
            assert told <= piece.num_shown <= piece.keep
            told = piece.num_shown
            if piece.stop_string is not None:
                break
        assert (piece.stop_string is None) == (stop == "zz")
    stream = TextStream(byte_level, ("abc",))
    assert stream.feed(each_character(byte_level, "xyz ab")).num_shown == len("xyz ")


def test_p11_a_stop_string_within_min_tokens_is_ordinary_text(byte_level: Tokenizer) -> None:
    ids = each_character(byte_level, "aSbcSd")
    text, piece = run(TextStream(byte_level, ("S",), min_tokens=5), ids)
    assert (text, piece.stop_string, piece.keep) == ("aSbc", "S", 4)
    text, piece = run(TextStream(byte_level, ("S",), min_tokens=6), ids)
    assert (text, piece.stop_string, piece.keep) == ("aSbcSd", None, 6)


def test_the_stop_string_can_stay_in_the_text(byte_level: Tokenizer) -> None:
    ids = each_character(byte_level, "one STOP two")
    text, piece = run(TextStream(byte_level, ("STOP",), include_stop=True), ids)
    assert text == "one STOP"
    assert piece.keep == len("one STOP")


def test_a_token_that_holds_kept_text_and_the_stop_string_is_kept(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one world")
    assert [byte_level.token_text(i) for i in ids] == ["one", " world"]
    _, piece = run(TextStream(byte_level, ("orl",)), ids)
    assert (piece.text, piece.keep) == (" w", 2)
    _, piece = run(TextStream(byte_level, (" wor",)), ids)
    assert (piece.text, piece.keep) == ("", 1)
    _, piece = run(TextStream(byte_level, ("one",)), ids)
    assert (piece.text, piece.keep) == ("", 0)


def test_special_tokens_are_shown_only_on_request_and_can_then_be_stop_strings(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_start|>b<|im_end|>c")
    assert run(TextStream(byte_level), ids)[0] == "abc"
    text, piece = run(TextStream(byte_level, ("<|im_end|>",), skip_special_tokens=False), ids)
    assert (text, piece.stop_string, piece.keep) == ("a<|im_start|>b", "<|im_end|>", 3)


def test_the_leading_space_belongs_to_a_continued_text_only(spaced: Tokenizer) -> None:
    ids = spaced.encode("abc abc", add_special_tokens=False)
    assert run(TextStream(spaced), ids)[0] == "abc abc"
    assert run(TextStream(spaced, continues=True), ids)[0] == " abc abc"
    assert spaced.decode(ids, continues=True) == " abc abc"


def test_ids_of_padding_rows_add_nothing(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level)
    assert stream.feed([byte_level.vocab_size + 5]) == Piece("", None, 1, 1)


def test_a_request_is_followed_in_all_its_parameters(byte_level: Tokenizer) -> None:
    sampling = SamplingParams(
        stop=("d",), min_tokens=2, max_tokens=9, include_stop_str_in_output=True, skip_special_tokens=False
    )
    ids = byte_level.encode("<|im_start|>") + each_character(byte_level, "d.d.")
    text, piece = run(TextStream.for_request(byte_level, sampling), ids)
    assert (text, piece.keep) == ("<|im_start|>d", 2)


@given(
    text=st.text(" abñ日👍", max_size=30),
    stops=st.lists(st.text(" abñ日👍", min_size=1, max_size=4), max_size=4, unique=True).map(tuple),
    include=st.booleans(),
    data=st.data(),
)
@settings(max_examples=400)
def test_any_cut_of_any_answer_equals_the_text_up_to_its_first_stop_string(
    byte_level: Tokenizer, text: str, stops: tuple[str, ...], include: bool, data: st.DataObject
) -> None:
    whole = data.draw(st.booleans())
    ids = byte_level.encode(text) if whole else each_character(byte_level, text)
    found = first_completed(text, stops) if stops else None
    expected = text
    if found:
        expected = text[: found[0] if include else found[0] - len(found[1])]
    got, piece = run(TextStream(byte_level, stops, include_stop=include), ids, data.draw(st.integers(1, 7)))
    assert got == expected
    assert piece.stop_string == (found[1] if found else None)
    assert_keep_is_least(byte_level, ids, expected, piece, len(ids) if not found else None)


def assert_keep_is_least(tokenizer: Tokenizer, ids: list[int], kept: str, piece: Piece, all_tokens: int | None) -> None:
    """`keep` tokens give at least the kept text, and one fewer would not."""
    if all_tokens is not None:
        assert piece.keep == all_tokens
        return
    full = kept.encode()
    raw = [b"".join(tokenizer.token_bytes(i) for i in ids[:n]) for n in (piece.keep, piece.keep - 1)]
    assert len(raw[0]) >= len(full)
    assert piece.keep == 0 or len(raw[1]) < len(full)
