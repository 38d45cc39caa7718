"""The device runner without a GPU: the same functions over the same fixed buffers, graphs replayed as calls.

Whatever is captured and padded, tokens are those of transformers, or of the plain runner.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from steelyard.checkpoint.find import open_checkpoint
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import Copy, RowEnter, RowWork, StepPlan, StepResult, TableEdit, Want
from steelyard.kernels.gathered import GatheredAttention
from steelyard.kernels.reference import ReferenceBackend
from steelyard.kernels.step import FrameLayout
from steelyard.plan.captures import Buckets
from steelyard.runner import logprobs, start_device
from steelyard.runner.device_runner import DeviceRunner
from steelyard.runner.graphs import bucket_for
from steelyard.runner.options import RunnerOptions
from steelyard.runner.start_device import start_device_runner
from tests.equality import llama_rig
from tests.equality.llama_rig import Cell, Ran, check_greedy, prompts, request, run, tiny_llama

LENS = (1, 15, 16, 17, 32, 47)
Model = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("device")
    return folder, tiny_llama(folder)


def serve(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cell: Cell, requests: list[Any], late: list[Any] | None = None,
    **options: Any,
) -> tuple[Ran, list[StepResult]]:  # fmt: skip
    """`llama_rig.run` on a DeviceRunner with the reference backend; and every step's result."""
    results: list[StepResult] = []

    def start(checkpoint: Any, given: RunnerOptions) -> DeviceRunner:
        runner = start_device_runner(checkpoint, replace(given, backend="reference", **options))
        collect = runner.collect

        def kept(step: Any) -> StepResult:
            results.append(collect(step))
            return results[-1]

        runner.collect = kept  # type: ignore[method-assign]
        return runner

    with monkeypatch.context() as patch:
        patch.setattr(llama_rig, "start_runner", start)
        return run(folder, cell, requests, late), results


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(("budget", "eager"), [(512, False), (20, False), (20, True)], ids=str)
def test_greedy_tokens_are_those_of_transformers(
    model: Model, overlap: bool, budget: int, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = model
    requests = [request(f"r{i}", p, max_tokens=9 + 3 * i) for i, p in enumerate(prompts(LENS))]
    ran, results = serve(monkeypatch, folder, Cell(budget, overlap=overlap), requests, enforce_eager=eager)
    check_greedy(oracle, ran)
    assert ran.simulation.max_in_flight == (2 if overlap else 1)
    kinds = {r.timing.graph.split(" ")[0] for r in results}
    assert kinds == ({""} if eager else {"decode", "mixed"})
    if not eager:
        assert sum(r.timing.padded_rows for r in results) > 0 and sum(r.timing.padded_tokens for r in results) > 0


def test_prefix_hits_forks_and_preemption_on_fixed_buffers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, oracle = model
    first = [request("a", prompts((48,), shared=48)[0])]
    again = [request(f"b{i}", p) for i, p in enumerate(prompts((48, 49, 60, 40), shared=40))]
    parent = request("f", prompts((19,))[0])
    forks = [parent, *(request("f", parent.tokens, index=i, fork_of=parent) for i in (1, 2))]
    cell = Cell(block_size=4, num_blocks=44, overlap=True)
    ran, _ = serve(monkeypatch, folder, cell, first, [*again, *forks])
    check_greedy(oracle, ran)
    counters = ran.scheduler.counters
    assert counters.prefix_hits_tokens > 0 and counters.forks > 0 and counters.preemptions > 0


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.2, "top_k": 4, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": ((7, 3.0),), "min_tokens": 3},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
]


@pytest.mark.parametrize("name", ["naive", "sdpa"])
def test_plain_attentions_have_the_steps_sizes_on_the_host(
    model: Model, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device's batch carries the longest row of an eager step, which gathered attention pads to."""
    folder, oracle = model

    class Plain(ReferenceBackend):
        def __init__(self) -> None:
            super().__init__()
            self.attention = GatheredAttention(name)

    monkeypatch.setattr(start_device, "ReferenceBackend", Plain)
    requests = [request(f"r{i}", p, max_tokens=9 + 3 * i) for i, p in enumerate(prompts(LENS))]
    ran, results = serve(monkeypatch, folder, Cell(20, overlap=True), requests, enforce_eager=True)
    check_greedy(oracle, ran)
    assert ran.mixed_steps > 0 and not any(r.timing.graph for r in results)


@pytest.mark.parametrize("cut", [False, True], ids=["plain", "cut"])
def test_sampled_tokens_are_those_of_the_plain_runner(model: Model, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = model
    kinds = SAMPLED if cut else [SAMPLED[0], *SAMPLED[3:]]

    def requests() -> list[Any]:
        return [
            request(f"r{i}", p, 12, **kinds[i % len(kinds)]) for i, p in enumerate(prompts((5, 9, 20, 3, 30, 11, 8)))
        ]

    cell = Cell(budget=24, backend="reference", overlap=True)
    expected = run(folder, cell, requests())
    ran, results = serve(monkeypatch, folder, cell, requests())
    assert ran.outputs == expected.outputs
    logprobs = [row.logprobs for r in results for row in r.rows if row.logprobs]
    assert logprobs and all(len(of_row) == 1 for of_row in logprobs)
    judged = next(r for r in ran.requests if r.sampling.prompt_logprobs is not None)
    twin = next(r for r in expected.requests if r.key == judged.key)
    assert len(judged.prompt_logprobs) == judged.prompt_len - 1
    for ours, theirs in zip(judged.prompt_logprobs, twin.prompt_logprobs):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_more_differences_than_a_frame_holds_go_ahead_of_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, oracle = model
    monkeypatch.setattr(start_device, "FrameLayout", lambda max_rows, _: FrameLayout(max_rows, 32))
    requests = [request(f"r{i}", p) for i, p in enumerate(prompts((90, 70, 15)))]
    check_greedy(oracle, serve(monkeypatch, folder, Cell(), requests)[0])


def start(folder: Path, **options: Any) -> DeviceRunner:
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 40, "max_num_seqs": 4, "dtype": "float32"}
    sizes |= {"max_num_batched_tokens": 64, "device": "cpu", "backend": "reference"}
    return start_device_runner(open_checkpoint(str(folder)), RunnerOptions(**(sizes | options)))


def enter(row: int, first_block: int, prompt: tuple[int, ...], **sampling: Any) -> dict[str, Any]:
    params = SamplingParams(**({"temperature": 0.0, "seed": 9} | sampling))
    return {
        "enter": (RowEnter(row, 5, prompt, len(prompt), 0, params),),
        "edits": (TableEdit(0, row, 0, tuple(range(first_block, first_block + 6))),),
        "work": (RowWork(row, 0, len(prompt), Want.TOKEN),),
    }


def go(runner: DeviceRunner, **parts: Any) -> StepResult:
    return runner.collect(runner.launch(StepPlan(0, **parts)))


def test_a_row_that_is_not_finite_fails_alone(model: Model) -> None:
    runner = start(model[0])
    runner._machine.decoder.embedding.weight[7] = torch.nan
    bad, good = enter(1, 1, (3, 7, 4)), enter(0, 7, (5, 6, 8))
    result = go(runner, **{key: bad[key] + good[key] for key in bad})
    assert [row for row, _ in result.failed] == [1] and "finite" in result.failed[0][1]
    assert [r.row for r in result.rows] == [0] and len(result.rows[0].ids) == 1


def test_memory_that_runs_out_fails_the_step_it_ran_out_in(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = go(start(model[0]), **enter(0, 1, (5, 6, 8))).rows[0].ids
    runner = start(model[0], enforce_eager=True)
    with monkeypatch.context() as patch:

        def too_much(*_: Any) -> None:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")

        patch.setattr(runner._machine.step, "forward", too_much)
        result = go(runner, **enter(1, 7, (5, 6, 8)))
    assert not result.rows and result.failed[0][0] == 1 and "9 GiB" in result.failed[0][1]
    assert go(runner, leave=(1,), **enter(0, 1, (5, 6, 8))).rows[0].ids == expected


def test_a_step_that_fails_before_its_work_leaves_no_row_with_another_ones_table(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap the next step, of the same rows, is launched before this one's failure is known."""
    runner = start(model[0])

    def too_much(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(runner._machine.kv, "copy", too_much)
    step = runner.launch(StepPlan(0, **enter(1, 7, (5, 6, 8)), copies=(Copy(0, 1, 7),)))
    assert runner._rows.tables[0][1].tolist()[:6] == [7, 8, 9, 10, 11, 12] and runner._rows.tokens[1, 2] == 8
    assert runner.collect(step).failed[0][0] == 1


def test_a_step_that_fails_behind_its_logits_waits_for_no_mask(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = start(model[0])

    def too_much(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(logprobs, "prompt_logprobs", too_much)
    parts = enter(0, 1, (5, 6, 8), prompt_logprobs=1)
    work = (RowWork(0, 0, 3, Want.TOKEN | Want.PROMPT_LOGPROBS),)
    step = runner.launch(StepPlan(0, **{**parts, "work": work}, masked=(0,)))
    assert step.done_ns > 0, "its end is marked"
    runner.sample(step, {})
    assert runner.collect(step).failed[0][0] == 0


def test_memory_that_runs_out_under_a_mask_fails_its_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = start(model[0])
    step = runner.launch(StepPlan(0, **enter(0, 1, (5, 6, 8)), masked=(0,)))

    def too_much(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(runner._sampler, "run", too_much)
        runner.sample(step, {0: np.full(7, -1, np.int32)})
    assert "9 GiB" in runner.collect(step).failed[0][1]


def test_masked_rows_wait_for_their_mask(model: Model) -> None:
    runner = start(model[0])
    first, second = enter(0, 1, (5, 6, 8)), enter(1, 7, (9, 4), temperature=1.0)
    step = runner.launch(StepPlan(0, **{k: first[k] + second[k] for k in first}, masked=(1,)))
    words = torch.zeros(7, dtype=torch.int32)
    words[33 // 32] = 1 << (33 % 32)
    runner.sample(step, {1: words.numpy()})
    found = {r.row: r.ids for r in runner.collect(step).rows}
    assert found[1] == (33,) and len(found[0]) == 1


def test_a_slot_is_not_written_while_its_step_is_in_flight(model: Model) -> None:
    runner = start(model[0])
    runner.launch(StepPlan(0, **enter(0, 1, (5, 6, 8))))
    for i in range(2):
        runner.launch(StepPlan(i + 1, work=(RowWork(0, 3 + i, 1, Want.TOKEN),)))
    with pytest.raises(AssertionError, match="slots"):
        runner.launch(StepPlan(3, work=(RowWork(0, 5, 1, Want.TOKEN),)))


def test_buckets_hold_every_size_with_little_padding() -> None:
    buckets = Buckets.of(256, 8192, num_layers=28, layer_elements=440_000_000)
    assert buckets.decode[:4] == (1, 2, 4, 8) and buckets.decode[-1] == 256 and buckets.mixed[-1] == 8192
    for sizes, fine in ((buckets.decode, 8), (buckets.mixed, 32)):
        assert list(sizes) == sorted(set(sizes))
        for size in range(1, sizes[-1] + 1):
            found = bucket_for(sizes, size)
            assert found is not None and found >= size and found - size < max(fine, size // 7)
    assert bucket_for(buckets.mixed, 8193) is None
    large = Buckets.of(256, 8192, num_layers=32, layer_elements=7_000_000_000)
    assert 1024 <= large.mixed[-1] < 2048, "a long step of a large model takes the device longer than its launch"
    assert Buckets.of(3, 20, 2, 1000) == Buckets((1, 2, 3), (1, 2, 4, 8, 16, 20)[-1:])


@pytest.mark.slow
def test_tokens_through_triton_kernels_are_those_of_the_plain_runner(tmp_path: Path) -> None:
    """One tiny model through every kernel of a step, in the interpreter where there is no GPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, head_dim=64,
        num_key_value_heads=1, max_position_embeddings=96, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    found = []
    for backend in ("reference", "triton"):
        runner = start(tmp_path, backend=backend, enforce_eager=True, max_num_seqs=2, max_num_batched_tokens=32)
        first, second = enter(0, 1, (5, 6, 8, 11, 40)), enter(1, 7, (9, 4), temperature=1.0, top_p=0.9)
        ids = [go(runner, **first).rows[0].ids]
        steps = [
            {"work": (RowWork(0, 5, 1, Want.TOKEN),)},
            {**second, "work": (RowWork(0, 6, 1, Want.TOKEN), *second["work"])},
            {"work": (RowWork(0, 7, 1, Want.TOKEN), RowWork(1, 2, 1, Want.TOKEN))},
        ]
        ids += [row.ids for parts in steps for row in go(runner, **parts).rows]
        found.append(ids)
    assert found[0] == found[1]
