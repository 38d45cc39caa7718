"""The file of flags: it says what a command line could, the command line goes first, and mistakes name their key."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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


def read(file: Path, text: str, *words: str) -> dict[str, Any]:
    """All that is set by a file with `text` and the command line."""
    file.write_text(text, encoding="utf-8")
    found = vars(parse(*words, "--config", str(file)))
    assert found.pop("config") == str(file)
    return found


def mistake(file: Path, text: str) -> str:
    with pytest.raises(StartError) as raised:
        read(file, text)
    assert raised.value.message.startswith(f"--config {file}: ")
    return raised.value.message.removeprefix(f"--config {file}: ")


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


SAME = [
    ('api-key = ["-Kx9abc"]', ["--api-key=-Kx9abc"]),
    ('api_key = "k"', ["--api-key", "k"]),
    ('api-key = ["a", "b"]\nport = 3', ["--api-key", "a", "b", "--port", "3"]),
    ('allowed-origins = ["a", "b"]', ["--allowed-origins", '["a", "b"]']),
    ('host = "-x"', ["--host=-x"]),
    ("seed = -5\nmax_num-seqs = 0x10", ["--seed", "-5", "--max-num-seqs", "16"]),
    ('kv-cache-memory-bytes = "1GiB"\nmax-body-bytes = 4096', ["--kv-cache-memory-bytes=1G", "--max-body-bytes=4096"]),
    ("shutdown-timeout = 1.5", ["--shutdown-timeout", "1.5"]),
    ("enforce-eager = true\nenable-prefix-caching = true", ["--enforce-eager", "--enable-prefix-caching"]),
    ("enforce-eager = false\nenable-prefix-caching = false", ["--no-enable-prefix-caching"]),
    ("no-enable-prefix-caching = false", ["--enable-prefix-caching"]),
    ('served-model-name = "é"', ["--served-model-name", "é"]),
]


@pytest.mark.parametrize(("text", "words"), SAME, ids=[text for text, _ in SAME])
def test_a_file_says_what_the_command_line_says(file: Path, text: str, words: list[str]) -> None:
    expected = vars(parse(*words))
    del expected["config"]
    assert read(file, text) == expected != {}


@pytest.mark.parametrize("key", ["--", "--port=1", "-", "", "-h"])
def test_an_item_of_a_list_may_look_like_a_flag(file: Path, key: str) -> None:
    assert read(file, f'api-key = ["{key}", "b"]\nport = 3') == {"api_key": [key, "b"], "port": 3}


WRONG = [
    ("api-key = [true]", "--api-key: must be text in quotes, got true or false"),
    ('api-key = ["a", ["b"]]', "--api-key: must be text in quotes, got a list"),
    ("api-key = [5]", "--api-key: must be text in quotes, got a number"),
    ("api-key = []", "--api-key: needs at least one value"),
    ("host = 5", "--host: must be text in quotes, got a number"),
    ("dtype = true", "--dtype: must be text in quotes, got true or false"),
    ("served-model-name = 2020-01-01", "--served-model-name: must be text in quotes, got a date or a time"),
    ("port = true", "--port: must be a number, got true or false"),
    ("port = [1]", "--port: takes one value, got a list"),
    ("port = 8001.0", "--port: must be a whole number, got '8001.0'"),
    ("shutdown-timeout = inf", "--shutdown-timeout: must be a number that is finite, got inf"),
    ('enforce-eager = "no"', "--enforce-eager: must be true or false, got text"),
    ("public-metrics = 1", "--public-metrics: must be true or false, got a number"),
    ('dtype = "float"', "--dtype: must be one of auto, float32, bfloat16, float16, got 'float'; did you mean float32?"),
    ('config = "x"', "--config cannot stand in the file: one file is read"),
    ("api-key = 'a'\napi_key = 'b'", "--api-key: its value is given twice"),
    ("public-metrics = true\nno-public-metrics = true", "--no-public-metrics: its value is given twice"),
    ("[a]\nb = 1", "a is a table: the file has flags' names and their values, and no tables"),
    ("port.b = 1", "port is a table: the file has flags' names and their values, and no tables"),
    ("[[tenant]]\nname = 5", "tenant is a table: the file has flags' names and their values, and no tables"),
    ("prot = 80", "there is no flag --prot; did you mean --port?"),
    ("no-enforce-eager = true", "there is no flag --no-enforce-eager; did you mean --enforce-eager?"),
    ("model_positional = 'x'", "there is no flag --model-positional"),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[text for text, _ in WRONG])
def test_a_mistake_names_its_key(file: Path, text: str, words: str) -> None:
    assert mistake(file, text) == words


def test_a_file_that_is_not_utf_8_is_said(file: Path) -> None:
    file.write_bytes(b'host = "\xff"\n')
    with pytest.raises(StartError, match=f"--config {file}: 'utf-8' codec"):
        parse("--config", str(file))
