"""The file of flags: it says what a command line could, the command line goes first, and mistakes name their key."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from steelyard.cli.options import engine_config
from steelyard.cli.parser import Parser
from steelyard.cli.serve import add_arguments
from steelyard.cli.server_options import server_config, with_file
from steelyard.errors import StartError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "flags.toml"


def parse(*words: str) -> argparse.Namespace:
    parser = Parser()
    add_arguments(parser)
    return with_file(parser.parse_args(words), add_arguments)


@pytest.mark.parametrize("words", [["/line"], ["--model", "/line"], ["/line", "--model", "/line"]], ids=str)
def test_the_command_line_s_model_wins_however_it_is_given(file: Path, words: list[str]) -> None:
    file.write_text('model = "/file"\nport = 0\n')
    args = parse(*words, "--config", str(file))
    assert engine_config(args).model == "/line"
    assert server_config(args).port == 0
    assert engine_config(parse("--config", str(file))).model == "/file"


def test_two_models_on_the_command_line_are_refused_with_a_file_too(file: Path) -> None:
    file.write_text('model = "/one"\n')
    with pytest.raises(StartError, match="two models are named, /one and --model /two"):
        engine_config(parse("/one", "--model", "/two", "--config", str(file)))
