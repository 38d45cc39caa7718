"""Values of flags are refused before anything is measured, and a mistake on a command line is one line."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli import values
from steelyard.cli.bench_serve import targets
from steelyard.cli.main import COMMANDS, main
from steelyard.cli.parser import Misuse, Parser


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (values.whole(1), {"1": 1, "70": 70}, ("0", "-1", "x", "1.5", "")),
        (values.whole(0, 3), {"0": 0, "3": 3}, ("4", "-1")),
        (values.real(0), {"0": 0.0, "2.5": 2.5}, ("-0.1", "nan", "inf", "x")),
        (values.real(-2, 2), {"-2": -2.0, "2": 2.0}, ("2.1", "nan")),
        (values.above(0), {"0.5": 0.5}, ("0", "-1", "nan", "inf")),
        (values.above(0, 1), {"1": 1.0}, ("0", "1.01")),
        (values.above(0, inf), {"inf": inf}, ("0", "nan")),
        (values.counts, {"8": (8, 8), "1..256": (1, 256)}, ("x", "0", "4..2", "1..", "..3")),
        (values.url, {"http://h:1/": "http://h:1", "https://h": "https://h"}, ("h:1", "http://", "")),
        (values.wholes(1), {"8": (8,), "1,2": (1, 2)}, ("x", "0", "1,", "1,,2", "")),
        (values.whole(), {"-3": -3}, ("x", "1.5")),
        (values.real(), {"-3": -3.0}, ("inf", "-inf", "nan", "x")),
        (
            values.span("ms"),
            {"500": 500.0, "500ms": 500.0, "0.5s": 500.0, "80us": 0.08, " 2m ": 120e3},
            ("0", "-1", "1h", ""),
        ),
        (values.span("s"), {"0.5": 0.5, "500ms": 0.5, ".5 s": 0.5}, ("0ms", "nan", "inf", "ms")),
        (targets, {"ttft:500 e2el:9s": {"ttft_ms": 500.0, "e2e_ms": 9000.0}}, ("ttft", "ttft:1h", "itl:5")),
        (values.json_object, {'{"a": 1}': {"a": 1}}, ("x", "[1]")),
    ],
)
def test_a_value_is_taken_or_refused_in_words(
    parse: Callable[[str], Any], good: dict[str, Any], bad: tuple[str, ...]
) -> None:
    for text, value in good.items():
        assert parse(text) == value
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="must"):
            parse(text)


def test_where_nothing_can_be_written_or_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    assert values.new_file(str(tmp_path / "new")) == tmp_path / "new"
    assert values.new_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert values.old_file(str(tmp_path / "there")) == tmp_path / "there"
    for parse, path in (
        (values.new_file, tmp_path),
        (values.new_file, tmp_path / "no" / "x"),
        (values.new_folder, tmp_path / "there" / "x"),
        (values.old_file, tmp_path / "missing"),
        (values.old_file, tmp_path),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=str(path)):
            parse(str(path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bench latency --batch x", "steelyard bench latency: --batch: must be a number or LOW..HIGH"),
        ("bench latency --runs 0", "--runs: must be a whole number of at least 1, got 0"),
        ("bench throughput --share 0", "--share: must be a number above 0 and at most 1, got 0"),
        ("bench throughput --json /nodir/x", "--json: /nodir/x cannot be written: there is no folder /nodir"),
        ("bench serve --extra-body x", "--extra-body: must be a JSON object"),
        ("bench serve --base-url h:1", "--base-url: must begin with http://"),
        ("bench serve --save-result --result-dir /dev/null/x", "--result-dir: /dev/null/x cannot be a folder"),
        ("explain --timeline --svg /nodir/x.svg", "--svg: /nodir/x.svg cannot be written"),
        ("explain --slowest 0", "--slowest: must be a whole number between 1 and 1000"),
        ("quality --base foo --arm http://h:1", "steelyard quality: --base: must begin with http://"),
        ("explain --url h:1", "--url: must begin with http://"),
        ("diagnose http://h:1 --seconds 0", "--seconds: must be a number above 0, got 0"),
        ("bench sweep --search", "--search needs --goodput"),
        ("bench sweep --search --goodput ttft:500 --num-prompts 3", "--num-prompts 3: too few to show 90%"),
        ("bench sweep --search --goodput ttft:500 --attainment 1", "no number of requests shows that"),
        ("explain --svg /tmp/x.svg", "--svg: draws what --timeline prints"),
        ("diagnose http://h:1 --plan-model smollm2", "--plan-device is missing: --plan-model means nothing without it"),
        ("diagnose http://h:1 --ttft 1h --tpot 50", "--ttft: must be a time above 0, such as 500ms or 0.5s, got '1h'"),
        ("bench serve --goodput ttft:x --num-prompts 1", "--goodput: must be ttft:TIME, tpot:TIME or e2el:TIME"),
        ("diagnose http://h:1 --tpot 50", "--ttft is missing"),
        ("ablate smollm2 --knob dtype --plan-device H200", "--plan-model is missing"),
        ("plan llama-3-8b --to device=H100", "--to is read by `steelyard plan compare MODEL` only"),
        ("plan cache llama-3-8b --held-out x", "--held-out is read by `steelyard plan fit MODEL` only"),
        ("selftest --near-tie -1", "--near-tie: must be a number of at least 0"),
        ("serve --port x", "steelyard serve: --port: must be a whole number, got 'x' (`steelyard serve --help`"),
        ("serve --swap-space nan", "--swap-space: must be a number that is finite, got nan"),
        (
            "serve --dtype bfloat",
            "--dtype: must be one of auto, float32, bfloat16, float16, got 'bfloat'; did you mean",
        ),
        ("serve --port", "--port: needs a value ("),
        ("serve --enforce-eager=3", "--enforce-eager: takes no value, got '3' ("),
        ("serve --allowed-origins [x", "--allowed-origins: must be an origin or a JSON list of them, got '[x'"),
        ("serve --kv-cache-memory-bytes 3q", "--kv-cache-memory-bytes: must be bytes, or a number with MiB"),
        ("serve --kernel-cache=", "--kernel-cache must name a folder: it is empty"),
        ("bench kernels --backends=", "--backends must be among naive, "),
        ("bench kernels --lengths 1,x", "--lengths: must be whole numbers of at least 1 with commas between"),
        ("plan llama-3-8b --ttft x", "--ttft: must be a time above 0, such as 500ms or 0.5s, got 'x'"),
        ("keys hsh", "steelyard keys: ACTION: must be one of new, hash, got 'hsh'; did you mean hash?"),
        ("bench", "steelyard bench: missing: BENCH ("),
        (
            "serve --max-num 3",
            "--max-num; did you mean --max-num-seqs or --max-num-batched-tokens or",
        ),
        ("serve --max-mdel-len 3", "steelyard serve: there is no flag --max-mdel-len; did you mean --max-model-len?"),
        ("bench serve --bogus=1", "steelyard bench serve: there is no flag --bogus ("),
    ],
)
def test_a_mistake_on_a_command_line_is_one_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "ablate", "diagnose", "explain", "quality", "selftest", "serve", "bench"])
def test_every_flag_says_what_it_is(command: str) -> None:
    parser = Parser(prog=command)
    importlib.import_module(f"steelyard.cli.{command}").add_arguments(parser)
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    parsers = [parser, *(p for a in nested for p in a.choices.values())]
    flags = [a for p in parsers for a in p._actions if a.option_strings]
    assert flags
    assert [a.option_strings for a in flags if not a.help] == []


def every_parser() -> list[Parser]:
    """Those of all commands, and those within them."""
    found: list[Parser] = []
    for command in COMMANDS:
        outer = Parser(prog=f"steelyard {command}")
        importlib.import_module(f"steelyard.cli.{command}").add_arguments(outer)
        inner = [p for a in outer._actions if isinstance(a, argparse._SubParsersAction) for p in a.choices.values()]
        found += [outer, *inner]
    return found


def test_no_parser_takes_an_abbreviated_flag(capsys: pytest.CaptureFixture[str]) -> None:
    parsers = every_parser()
    assert len(parsers) > len(COMMANDS) + 5
    for parser in parsers:
        assert main([*parser.prog.split()[1:], "--hel"]) == 2, f"{parser.prog} --hel is taken for --help"
        flags = [f for f in parser._option_string_actions if f.startswith("--")]
        for short in {f[:-1] for f in flags} - {*flags, "--"}:
            with pytest.raises(Misuse, match=r"there is no flag|missing: "):
                parser.parse_args([short])
    assert capsys.readouterr().out == ""


def test_every_flag_refuses_a_value_of_the_wrong_kind_in_our_words() -> None:
    num_refused = 0
    for parser in every_parser():
        for action in parser._actions:
            try:
                parser._check_value(action, parser._get_value(action, "\0?"))
            except argparse.ArgumentError as error:
                assert re.match(r"must be |must begin with |.*(cannot be|there is no such file)", error.message), error
                num_refused += 1
    assert num_refused > 150


def test_a_default_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "of a prompt (default: 256)" in said and "requests, of each group (default: 100) --group" in said


def test_a_default_of_several_is_told_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["plan"], "(default: 1,8,32,"), (["bench", "kernels"], "(default: 1,32)")):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert said in " ".join(capsys.readouterr().out.split())
    for parser in every_parser():
        assert not re.search(r"default: [(\[]", " ".join(parser.format_help().split())), parser.prog


def test_the_helps_name_what_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    for words, name in (
        (["ablate", "--help"], "kv-cache-dtype"),
        (["ablate", "--help"], "takes hours\nwithout a GPU"),
        (["bench", "throughput", "--help"], "short-long"),
        (["bench", "throughput", "--help"], "(1024 requests)"),
        (["plan", "--help"], "waste     reserving KV memory against paging it"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert name in capsys.readouterr().out
