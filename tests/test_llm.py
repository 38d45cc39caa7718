"""The offline facade over a tiny random model: order, equality with single runs, stop strings, chat, token ids."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import steelyard
from steelyard.core.sampling import SamplingParams, StructuredOutputs
from steelyard.core.step import StepPlan
from steelyard.errors import CheckpointError, InvalidRequest, StartError
from steelyard.llm import LLM, Progress
from tests import tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL = {"num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "check_invariants": True}
PROMPTS = ["The sea is", "STOP is a word", "one two three four five sail on, said the cook.", "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model.write(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), **SMALL)


def scripted(model: Path, tmp_path: Path, output: list[int], **options: object) -> LLM:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"eos_token_id": 2, "default": output}))
    return LLM(str(model), script=str(script), **options)


def test_k17_results_are_in_input_order_in_every_call_on_one_engine(llm: LLM) -> None:
    alone = {p: llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in PROMPTS}
    assert len(set(alone.values())) == len(PROMPTS)
    for prompts in (PROMPTS[:2], PROMPTS[2:], PROMPTS[::-1], [PROMPTS[0]] * 3):
        results = llm.generate(prompts, GREEDY)
        assert [r.prompt for r in results] == prompts
        assert [r.outputs[0].token_ids for r in results] == [alone[p] for p in prompts]
    assert llm.generate([], GREEDY) == []


def test_many_more_prompts_than_rows_and_different_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 7, ignore_eos=True) for i in range(20)]
    results = llm.generate([[5 + i, 6, 7] for i in range(20)], params)
    assert [len(r.outputs[0].token_ids) for r in results] == [1 + i % 7 for i in range(20)]
    assert [r.prompt_token_ids[0] for r in results] == [5 + i for i in range(20)]
    assert all(r.outputs[0].finish_reason == "length" and r.prompt is None for r in results)


def test_no_end_is_sampled_before_min_tokens_be_it_a_stop_id_or_the_texts_own(llm: LLM) -> None:
    wanted = {"temperature": 0.0, "max_tokens": 9, "min_tokens": 3}
    for ends, stop_ids in ((7, (7,)), (2, ())):
        sampling = SamplingParams(logit_bias=((ends, 100.0),), stop_token_ids=stop_ids, **wanted)
        [output] = llm.generate("The sea", sampling)[0].outputs
        assert output.finish_reason == "stop"
        assert output.token_ids.index(ends) == 3 == len(output.token_ids) - 1


def test_outputs_are_held_to_what_was_asked(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    kinds = [
        StructuredOutputs(json=schema),
        StructuredOutputs(regex="[ab]{3}"),
        StructuredOutputs(choice=("sea", "ship")),
        StructuredOutputs(grammar='start: "x" "y"'),
        None,
    ]
    params = [SamplingParams(max_tokens=100, seed=1, structured_outputs=kind) for kind in kinds]
    for _ in range(2):
        texts = [r.outputs[0].text for r in llm.generate(["The sea"] * 5, params)]
        assert json.loads(texts[0])["a"] in (1, 2)
        assert len(texts[1]) == 3 and set(texts[1]) <= {"a", "b"}
        assert texts[2] in ("sea", "ship") and texts[3] == "xy"
        assert texts[4] == llm.generate("The sea", params[4])[0].outputs[0].text
    with pytest.raises(InvalidRequest, match="cannot be"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(regex="(?=a)b")))
    with pytest.raises(InvalidRequest, match="exactly one"):
        StructuredOutputs(regex="a", json_object=True)


def test_an_output_ends_with_its_grammar_also_where_the_end_of_text_is_ignored(llm: LLM) -> None:
    held = SamplingParams(max_tokens=9, ignore_eos=True, structured_outputs=StructuredOutputs(choice=("sea",)))
    [output] = llm.generate("The", held)[0].outputs
    assert (output.text, output.finish_reason) == ("sea", "stop")


def test_a_grammar_that_fails_ends_its_own_prompt_and_not_the_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(grammar: str) -> None:
        raise RuntimeError("no such grammar")

    monkeypatch.setattr(llm.engine.grammars, "_before_compile", broken)
    held = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(choice=("fails",)))
    [output] = llm.generate("The", held)[0].outputs
    assert output.finish_reason == "error" and "no such grammar" in (output.error or "")


def test_texts_and_ids_agree_with_the_tokenizer(llm: LLM) -> None:
    [result] = llm.generate("The sea is", GREEDY)
    assert list(result.prompt_token_ids) == llm.encode("The sea is")
    [choice] = result.outputs
    assert choice.text == llm.tokenizer.decode(choice.token_ids, continues=True)
    [same] = llm.generate(llm.encode("The sea is"), GREEDY)
    assert same.outputs[0].token_ids == choice.token_ids
    assert llm.decode(llm.encode("wide and small", add_special_tokens=False)) == "wide and small"


def test_a_repeated_prompt_is_found_in_the_cache_and_changes_nothing(llm: LLM) -> None:
    tokens = [(7 * i) % 300 for i in range(48)]
    first, second = (llm.generate(tokens, GREEDY)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert first.outputs == second.outputs


def test_choices_and_logprobs(llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    [result] = llm.generate("The sea", sampling)
    assert [choice.index for choice in result.outputs] == [0, 1, 2]
    assert len({choice.token_ids for choice in result.outputs}) == 3
    for choice in result.outputs:
        assert choice.logprobs is not None and len(choice.logprobs) == 6
        assert all(len(entry.top) == 2 and entry.logprob <= entry.top[0][1] for entry in choice.logprobs)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids) - 1
    assert llm.generate("The sea", GREEDY)[0].outputs[0].logprobs is None


def test_progress_is_told_after_each_step(llm: LLM) -> None:
    told: list[Progress] = []
    llm.generate(PROMPTS, GREEDY, progress=told.append)
    assert told[-1] == Progress(4, 4, 48)
    assert [p.num_generated_tokens for p in told] == sorted(p.num_generated_tokens for p in told)
    assert len(told) >= 12


def test_a_stop_string_ends_text_and_ids_before_it(model: Path, tmp_path: Path) -> None:
    llm = scripted(model, tmp_path, [])
    ids = llm.encode("one two STOP three", add_special_tokens=False)
    llm = scripted(model, tmp_path, ids)
    [plain] = llm.generate("x", SamplingParams())
    assert plain.outputs[0].text == "one two STOP three"
    assert plain.outputs[0].finish_reason == "stop" and plain.outputs[0].stop_reason is None
    assert plain.outputs[0].token_ids == (*ids, 2)

    [cut] = llm.generate("x", SamplingParams(stop=("STOP",), logprobs=0))
    [choice] = cut.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one two ", "stop", "STOP")
    assert llm.decode(choice.token_ids).startswith("one two")
    assert len(choice.token_ids) < len(ids)
    assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)

    [kept] = llm.generate("x", SamplingParams(stop=("STOP",), include_stop_str_in_output=True))
    assert kept.outputs[0].text == "one two STOP"
    [held] = llm.generate("x", SamplingParams(stop=("threes",)))  # what was held back as a possible stop is not lost
    assert held.outputs[0].text == "one two STOP three"
    [by_id] = llm.generate("x", SamplingParams(stop_token_ids=(ids[1],)))
    assert by_id.outputs[0].stop_reason == ids[1] and by_id.outputs[0].token_ids == tuple(ids[:2])
    assert by_id.outputs[0].text == llm.decode(ids[:1])


def test_a_prompt_that_cannot_be_served_is_said_before_anything_is_computed(llm: LLM) -> None:
    told: list[Progress] = []
    with pytest.raises(InvalidRequest, match=r"prompt 1: .*\b5000\b.*\b1024\b") as caught:
        llm.generate([[1, 2], [1] * 5000, [3]], GREEDY, progress=told.append)
    assert caught.value.code == "context_length_exceeded" and not told
    with pytest.raises(InvalidRequest, match="at least 1 token"):
        llm.generate([[]], GREEDY)
    with pytest.raises(InvalidRequest, match="between 0 and 319, got 320 at position 1"):
        llm.generate([1, 320], GREEDY)
    with pytest.raises(InvalidRequest, match="2 given for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    assert llm.generate("The sea is", GREEDY)[0].outputs[0].finish_reason == "length"


def test_an_interrupted_call_leaves_a_usable_engine(llm: LLM) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.num_generated_tokens > 5:
            raise KeyboardInterrupt

    before = llm.generate(PROMPTS, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, progress=interrupt)
    assert [r.outputs for r in llm.generate(PROMPTS, GREEDY)] == [r.outputs for r in before]
    assert llm._engine.status().running == 0 and llm._engine.check()


def test_a_ctrl_c_in_the_middle_of_a_step_is_raised_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.generate(PROMPTS, GREEDY)
    launch, finished = llm._engine.runner.launch, []

    def interrupted(plan: StepPlan) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        finished.append(launch(plan))
        return finished[-1]

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert len(finished) == 1
    assert [r.outputs for r in llm.generate(PROMPTS, GREEDY)] == [r.outputs for r in before]


def test_chat_renders_the_template_and_streams_the_same_text(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Who said it?"}]
    [result] = llm.chat(talk, GREEDY)
    assert result.prompt is not None and result.prompt.endswith("<|im_start|>assistant\n")
    assert list(result.prompt_token_ids) == llm.encode(result.prompt, add_special_tokens=False)
    assert [r.outputs for r in llm.chat([talk, talk], GREEDY)] == [result.outputs] * 2
    pieces = list(llm.stream_chat(talk, GREEDY))
    assert "".join(p.text for p in pieces) == result.outputs[0].text
    assert [p.finish_reason for p in pieces if p.finish_reason] == ["length"] and pieces[-1].finish_reason
    with pytest.raises(InvalidRequest, match="two user turns"):
        llm.chat([*talk, *talk], GREEDY)


def test_a_stream_that_is_closed_stops_its_answer(llm: LLM) -> None:
    stream = llm.stream_chat([{"role": "user", "content": "Go on"}], SamplingParams(ignore_eos=True))
    next(stream)
    assert llm._engine.status().running == 1
    stream.close()
    assert llm._engine.status().running == 0 and not llm._engine.has_work


def test_without_a_tokenizer_ids_go_in_and_out(model: Path) -> None:
    llm = LLM(str(model), skip_tokenizer_init=True, **SMALL)
    [result] = llm.generate([[1, 2, 3]], GREEDY)
    assert len(result.outputs[0].token_ids) == 12 and result.outputs[0].text == ""
    for wrong in (lambda: llm.generate("text", GREEDY), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(InvalidRequest):
            wrong()
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        llm.generate([[1, 2]], SamplingParams(stop=("x",)))


def test_overlap_gives_the_same_tokens(model: Path, llm: LLM) -> None:
    overlapped = LLM(str(model), async_scheduling=True, **SMALL)
    assert overlapped._engine.runner.caps.overlaps
    assert [r.outputs for r in overlapped.generate(PROMPTS, GREEDY)] == [
        r.outputs for r in llm.generate(PROMPTS, GREEDY)
    ]


def test_a_start_that_fails_says_what_to_do(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(StartError, match="--dtype"):
        LLM(str(model), dtype="int3")
    with pytest.raises(StartError, match=r"--max-model-len 9999 .* 2048"):
        LLM(str(model), max_model_len=9999)
    with pytest.raises(StartError, match=r"1,000 bytes are left .*--kv-cache-memory-bytes"):
        LLM(str(model), kv_cache_memory_bytes=1000)
    with pytest.raises(
        StartError, match=r"not enough memory for tiny: an allocation of [0-9,.]+ GiB failed, [0-9.]+ GiB are free"
    ):
        LLM(str(model), num_gpu_blocks_override=10**10)
    with pytest.raises(TypeError, match="no_such_option"):
        LLM(str(model), no_such_option=1)


def test_the_facade_is_the_packages_own_name() -> None:
    assert steelyard.LLM is LLM and steelyard.SamplingParams is SamplingParams
