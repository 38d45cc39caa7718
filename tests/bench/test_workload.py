"""Prompts of exact length, cold unless declared otherwise, the same for a seed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from steelyard.bench.text_prompts import as_text, text_of_length
from steelyard.bench.traces import read_trace, requests_of
from steelyard.bench.workload import (
    GROUPS,
    Lengths,
    PromptMaker,
    Vocabulary,
    digest,
    group_lengths,
    num_repeated,
)
from steelyard.errors import InvalidRequest

MAKER = PromptMaker(0, "run a", Vocabulary(0, 1000, frozenset({5, 6})))


def test_lengths_are_exact_and_ids_in_the_vocabulary() -> None:
    for name, lengths in group_lengths(["all"]).items():
        found = MAKER.unique(lengths, 2, name)
        assert [(len(r.prompt_ids), r.output_len) for r in found] == [GROUPS[name]] * 2
        assert not {5, 6} & set(found[0].prompt_ids) and max(found[0].prompt_ids) < 1000


def test_no_prompt_begins_as_another_in_this_run_or_the_next() -> None:
    lengths = Lengths(64, 8)
    mine = MAKER.unique(lengths, 200, "g")
    other = PromptMaker(0, "run b", Vocabulary(0, 1000)).unique(lengths, 200, "g")
    assert len({r.prompt_ids[:16] for r in mine + other}) == 400
    assert num_repeated(mine) == 0 and num_repeated(mine + mine) == 200


def test_the_nonce_changes_the_cache_identity_and_not_the_work() -> None:
    lengths = Lengths(64, 8, spread=0.5)
    mine, again, other = (
        PromptMaker(seed, nonce, Vocabulary()).unique(lengths, 50, "g")
        for seed, nonce in ((1, "a"), (1, "b"), (2, "a"))
    )
    assert digest(mine) == digest(again) != digest(other)
    assert mine[0].prompt_ids[2:] == again[0].prompt_ids[2:] and mine[0].prompt_ids[:2] != again[0].prompt_ids[:2]


def test_spread_lengths_stay_in_range_and_are_used() -> None:
    found = MAKER.unique(Lengths(100, 50, spread=0.2), 300, "g")
    inputs = {len(r.prompt_ids) for r in found}
    assert min(inputs) >= 80 and max(inputs) <= 120 and len(inputs) > 20


def test_b05_a_shared_prefix_comes_on_top_of_the_input() -> None:
    found = MAKER.shared_prefix(Lengths(128, 4), 10, prefix_len=100)
    assert {len(r.prompt_ids) for r in found} == {228}
    assert len({r.prompt_ids[:100] for r in found}) == 1
    assert len({r.prompt_ids[100:116] for r in found}) == 10
    assert [r.shared_len for r in found] == [0] + [100] * 9
    assert num_repeated(found) == 0


def test_turns_carry_their_history_and_wait_for_it() -> None:
    found = MAKER.multi_turn(Lengths(32, 8), num_sessions=3, num_turns=2)
    first, second = found[1], found[4]
    assert second.after == first.id and second.prompt_ids[:32] == first.prompt_ids
    assert (len(second.prompt_ids), second.shared_len) == (32 + 8 + 32, 32)


def test_traces_of_three_kinds(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319569,3180,8\n"
    )
    rows = read_trace(azure)
    assert rows[1].at_s - rows[0].at_s == pytest.approx(0.0519969, abs=1e-6) and rows[0].input_len == 4808
    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,,1,ChatGPT,472,18,490,Conversation log\n45,,1,ChatGPT,1087,0,1087,Conversation log\n"
    )
    assert [(r.at_s, r.input_len, r.output_len) for r in read_trace(burst)] == [(5.0, 472, 18)]
    moon = tmp_path / "moon.jsonl"
    moon.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n'
        '{"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [7, 9]}\n'
    )
    first, second = requests_of(read_trace(moon), MAKER)
    assert (len(first.prompt_ids), len(second.prompt_ids)) == (600, 700)
    assert first.prompt_ids[:512] == second.prompt_ids[:512] and first.prompt_ids[512:] != second.prompt_ids[512:600]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "{\n"])
def test_bad_traces_name_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="--trace"):
        read_trace(path)


def test_text_prompts_have_the_asked_number_of_tokens() -> None:
    def count(text: str) -> int:  # two characters a token
        return -(-len(text) // 2)

    requests = MAKER.unique(Lengths(40, 4), 3, "g")
    found = as_text(requests, count, 0, "n")
    assert [count(r.text or "") for r in found] == [40] * 3 and len({r.text for r in found}) == 3
    with pytest.raises(InvalidRequest, match="exactly"):
        text_of_length(41, lambda text: 2 * len(text), random.Random(0))
    with pytest.raises(InvalidRequest, match="token ids"):
        as_text(MAKER.shared_prefix(Lengths(8, 4), 4, 8), count, 0, "n")


def test_unknown_groups_and_tiny_vocabularies_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="short-short"):
        group_lengths(["medium"])
    assert list(group_lengths(["4096/128"])) == ["long-short"]
    with pytest.raises(InvalidRequest, match="16"):
        Vocabulary(0, 10)


def test_shortened_groups_keep_their_proportions_and_say_so() -> None:
    assert group_lengths(["all"], 16) == {
        "short-short/16": Lengths(16, 8),
        "long-short/16": Lengths(256, 8),
        "short-long/16": Lengths(16, 64),
        "long-long/16": Lengths(256, 64),
    }
    with pytest.raises(InvalidRequest, match="--group-divisor"):
        group_lengths(["all"], 0)


def test_text_prompts_differ_in_their_first_block_even_from_the_warm_up() -> None:
    """Sixteen characters, each a token of its own as digits often are, are a whole block of a prefix cache."""
    requests = PromptMaker(1, "n", Vocabulary()).unique(Lengths(60, 4), 40, "g")
    texts = [
        r.text or "" for nonce in ("n" * 16, "n" * 16 + " warm-up", "m" * 16) for r in as_text(requests, len, 1, nonce)
    ]
    assert len({text[:12] for text in texts}) == len(texts) == 120


def test_a_file_that_is_no_trace_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# A title\nand text\n")
    with pytest.raises(InvalidRequest, match="line 2 is no request of Azure's CSV"):
        read_trace(path)
