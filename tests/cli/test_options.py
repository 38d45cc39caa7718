"""Engine flags: each reaches its field, sizes are read, mistakes are named."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from steelyard.cli.options import add_engine_arguments, engine_config, parse_size
from steelyard.config import EngineConfig
from steelyard.errors import StartError


def parse(*words: str, positional_model: bool = True) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser, positional_model=positional_model)
    return engine_config(parser.parse_args(words))


def test_no_flags_is_the_default_config() -> None:
    assert parse() == EngineConfig()
    assert parse(positional_model=False) == EngineConfig()


def test_every_field_has_a_flag_of_its_name() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    flags = {word for action in parser._actions for word in action.option_strings}
    assert {"--" + f.name.replace("_", "-") for f in fields(EngineConfig)} <= flags
    parser.format_help()


def test_flags_reach_their_fields() -> None:
    config = parse(
        *("--dtype", "bfloat16", "--load-format", "dummy", "--device", "cpu", "--max-model-len", "100"),
        *("--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--block-size", "32"),
        *("--num-gpu-blocks-override", "9", "--kv-cache-memory-bytes", "1.5GiB", "--gpu-memory-utilization", "0.5"),
        *("--no-enable-prefix-caching", "--enforce-eager", "--async-scheduling", "--seed", "7"),
        *("--skip-tokenizer-init", "--check-invariants", "--script", "s.json", "--model", "m"),
    )
    expected = EngineConfig(
        model="m",
        dtype="bfloat16",
        load_format="dummy",
        device="cpu",
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=9,
        kv_cache_memory_bytes=3 * 2**29,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        enforce_eager=True,
        async_scheduling=True,
        seed=7,
        skip_tokenizer_init=True,
        check_invariants=True,
        script="s.json",
    )
    assert config == expected
    assert parse("--no-async-scheduling").async_scheduling is False


def test_the_model_may_be_a_positional_argument_or_a_flag_but_not_two_different_ones() -> None:
    assert parse("path/to/model").model == "path/to/model"
    assert parse("same", "--model", "same").model == "same"
    with pytest.raises(StartError, match="two models"):
        parse("one", "--model", "other")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[("4096", 4096), ("1GiB", 2**30), ("1gib", 2**30), ("2 MiB", 2**21), ("1G", 2**30), ("1g", 10**9)],
        *[("1.5GB", 1_500_000_000), ("0.5K", 512), ("3TiB", 3 * 2**40), ("12345678901234567", 12345678901234567)],
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e9", "1GiBs", "one"])
def test_what_is_not_a_size_is_said(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be bytes"):
        parse_size(text)


def test_a_value_out_of_range_names_the_flag() -> None:
    with pytest.raises(StartError, match="--max-num-seqs must be at least 1"):
        parse("--max-num-seqs", "0")
