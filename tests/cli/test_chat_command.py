"""`steelyard chat` on a pipe, answering from a script: turns, commands, Ctrl-C, and a conversation that is too long."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from steelyard.cli import main as command
from steelyard.cli.chat import Conversation
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import StepPlan
from steelyard.llm import LLM
from tests import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model.write(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(scope="module")
def script(model: Path) -> str:
    ids = LLM(str(model), num_gpu_blocks_override=8).encode("The ship is small", add_special_tokens=False)
    path = model.parent / "script.json"
    path.write_text(json.dumps({"eos_token_id": 2, "default": ids}))
    return str(path)


@pytest.fixture
def llm(model: Path, script: str) -> LLM:
    return LLM(str(model), script=script)


def test_a_pipe_is_a_conversation_a_line_a_turn(
    model: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n\n/help\n/nonsense\nWhat?"))
    assert command.main(["chat", str(model), "--script", script, "--system", "Be brief"]) == 0
    out, err = capsys.readouterr()
    assert out == "The ship is small\nThe ship is small\n"
    assert err.count("Ctrl-D leaves") == 2 and "no such command /nonsense" in err


def test_turns_are_kept_cleared_and_framed(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(llm, SamplingParams(), "Be brief")
    talk.turn("Who?")
    answer = {"role": "assistant", "content": "The ship is small"}
    system = {"role": "system", "content": "Be brief"}
    assert talk.messages == [system, {"role": "user", "content": "Who?"}, answer]
    talk.turn("What?")
    assert talk.messages[3:] == [{"role": "user", "content": "What?"}, answer]
    talk.turn("/clear")
    assert talk.messages == [system]
    talk.turn("/system Be long")
    assert talk.messages == [{"role": "system", "content": "Be long"}]
    talk.turn("/system")
    assert talk.messages == []


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Conversation(llm, SamplingParams(), None)
    launch, num_steps = llm._engine.runner.launch, []

    def pressed_in_the_fourth_step(plan: StepPlan) -> object:
        num_steps.append(plan.id)
        if len(num_steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return launch(plan)

    monkeypatch.setattr(llm._engine.runner, "launch", pressed_in_the_fourth_step)
    talk.turn("Who?")
    out, err = capsys.readouterr()
    assert "[stopped]" in err and "The ship is small".startswith(out.rstrip("\n")) and 0 < len(out) < 17
    assert talk.messages[1] == {"role": "assistant", "content": out.rstrip("\n")}
    assert not llm._engine.has_work
    talk.turn("What?")
    assert capsys.readouterr().out == "The ship is small\n"


def test_an_answer_cut_by_its_limit_says_so(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    Conversation(llm, SamplingParams(max_tokens=2), None).turn("Who?")
    assert "[length]" in capsys.readouterr().err


def test_a_conversation_that_is_too_long_says_what_to_do_and_takes_the_question_back(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Conversation(llm, SamplingParams(max_tokens=50), None)
    talk.turn("Who?")
    talk.turn("x " * 3000)
    assert "/clear begins anew" in capsys.readouterr().err
    assert len(talk.messages) == 2
    talk.turn("What?")
    assert len(talk.messages) == 4
