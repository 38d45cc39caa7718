"""`steelyard generate` on a tiny model: text and JSONL, in input order, and mistakes with line and field."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.cli import main as command
from steelyard.core.sampling import SamplingParams
from steelyard.llm import LLM
from tests import tiny_model

GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")
SMALL = ("--num-gpu-blocks-override", "64", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return str(tiny_model.write(tmp_path_factory.mktemp("generate") / "tiny"))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, num_gpu_blocks_override=64)


def generate(model: str, *words: str) -> int:
    return command.main(["generate", *words, "--model", model, *SMALL])


def expected(llm: LLM, *prompts: Any, **sampling: Any) -> list[Any]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling})
    return [r.outputs[0] for r in llm.generate(list(prompts), params)]


def written(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_arguments_give_text_on_stdout_and_progress_on_stderr(
    model: str, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, "The sea is", *GREEDY) == 0
    out, err = capsys.readouterr()
    assert out == expected(llm, "The sea is")[0].text + "\n"
    assert "8 tokens" in err and "tokens/s" in err and "1/1" in err

    assert generate(model, "The sea is", "STOP is", "--no-progress", *GREEDY) == 0
    out, err = capsys.readouterr()
    first, second = expected(llm, "The sea is", "STOP is")
    assert out == f"== The sea is\n{first.text}\n\n== STOP is\n{second.text}\n\n"
    assert err == ""


def test_a_jsonl_file_of_all_kinds_comes_back_in_order(
    model: str, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [{"role": "user", "content": "Who?"}]
    path = written(
        tmp_path,
        {"prompt": "The sea is", "id": 7},
        "",
        {"token_ids": [5, 6, 7], "max_tokens": 3, "logprobs": 1},
        {"messages": talk, "stop": "zzz"},
        {"prompt": "x", "n": 2, "temperature": 1.0, "seed": 3, "logit_bias": {"5": -1.0}},
    )
    assert generate(model, "--input", path, "--no-progress", *GREEDY) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    first, second, third, fourth = results
    assert (first["id"], first["prompt"]) == (7, "The sea is")
    assert first["outputs"][0]["token_ids"] == list(expected(llm, "The sea is")[0].token_ids)
    assert second["token_ids"] == [5, 6, 7] and "id" not in second
    assert second["outputs"][0]["token_ids"] == list(expected(llm, [5, 6, 7], max_tokens=3)[0].token_ids)
    assert len(second["outputs"][0]["logprobs"]) == 3 and len(second["outputs"][0]["logprobs"][0]["top"]) == 1
    assert second["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert third["outputs"][0]["text"] == llm.chat(talk, greedy)[0].outputs[0].text
    assert [choice["index"] for choice in fourth["outputs"]] == [0, 1]
    assert fourth["outputs"][0]["token_ids"] != fourth["outputs"][1]["token_ids"]


def test_output_goes_to_a_file_as_jsonl(
    model: str, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    assert generate(model, "The sea is", "x", "--output", str(target), *GREEDY) == 0
    assert capsys.readouterr().out == ""
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [r["outputs"][0]["text"] for r in results] == [o.text for o in expected(llm, "The sea is", "x")]


def test_input_from_a_pipe_and_chat_messages_from_arguments(
    model: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "x"}\n'))
    assert generate(model, "--input", "-", *GREEDY) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "x"
    assert generate(model, "--chat", "Who?", *GREEDY) == 0
    answer = llm.chat(
        [{"role": "user", "content": "Who?"}], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    )
    assert capsys.readouterr().out == answer[0].outputs[0].text + "\n"


GOOD = {"prompt": "x"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([GOOD, "{not json"], "in.jsonl:2: not JSON"),
        ([GOOD, "", "[1]"], "in.jsonl:3: must be a JSON object, got list"),
        ([GOOD, {"prompt": "x", "temprature": 1}], "in.jsonl:2: temprature: no such field"),
        ([{"temperature": 1}], "in.jsonl:1: must have exactly one of prompt, messages, token_ids, got none"),
        ([{"prompt": "x", "token_ids": [1]}], "got prompt and token_ids"),
        ([GOOD, {"prompt": 5}], "in.jsonl:2: prompt: Expected `str`, got `int`"),
        ([{"token_ids": [1, "x"]}], "in.jsonl:1: token_ids: Expected `int`, got `str`"),
        ([{"prompt": "x", "temperature": "hot"}], "in.jsonl:1: temperature: Expected `float`, got `str`"),
        ([{"prompt": "x", "temperature": 9}], "in.jsonl:1: temperature: must be a number in [0, 2], got 9"),
        ([{"prompt": "x", "logit_bias": {"a": 1}}], "in.jsonl:1: logit_bias: keys must be token ids"),
        ([GOOD, GOOD, {"token_ids": [1, 999]}], "in.jsonl:3: prompt: token ids must be between 0 and 319, got 999"),
        ([GOOD, {"token_ids": [1] * 900, "max_tokens": 200}], "in.jsonl:2: prompt has 900 tokens"),
        ([GOOD, {"messages": [{"content": "no role"}]}], "in.jsonl:2: messages"),
    ],
)
def test_a_bad_line_is_said_with_its_number_and_field(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[Any], said: str
) -> None:
    assert generate(model, "--input", written(tmp_path, *lines), "--no-progress") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("steelyard generate: ") and err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give prompts as arguments, or a file with --input"),
        (("x", "--input", "f"), "give prompts as arguments, or a file"),
        (("--input", "/nowhere/f"), "cannot open /nowhere/f: No such file"),
        (("x", "--output", "/nowhere/f"), "cannot open /nowhere/f: No such file"),
        (("x", "--temperature", "5"), "temperature: must be a number in [0, 2]"),
        (("x", "--max-num-batched-tokens", "0"), "--max-num-batched-tokens must be at least 1"),
    ],
)
def test_bad_flags_are_said_in_one_line(
    model: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert generate(model, *words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
