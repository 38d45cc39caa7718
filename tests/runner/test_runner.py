"""TorchRunner under hand-written plans: what the scheduler never shows, and what must not happen to neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.checkpoint.find import open_checkpoint
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import Copy, RowEnter, RowWork, StepPlan, StepResult, TableEdit, Want
from steelyard.errors import StartError
from steelyard.ledger.memory import is_accounted_for
from steelyard.runner import options as options_module
from steelyard.runner.options import RunnerOptions, resolve_dtype
from steelyard.runner.runner import TorchRunner
from steelyard.runner.start import start_runner
from tests import tiny_model

PROMPT = tuple(range(10, 30))
BLOCK = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("runner") / "tiny")


def start(folder: Path, **options: Any) -> TorchRunner:
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"block_size": BLOCK, "num_gpu_blocks_override": 40, "max_num_seqs": 4}
    return start_runner(open_checkpoint(str(folder)), RunnerOptions(device="cpu", **(sizes | options)))


def enter(row: int, first_block: int, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> dict[str, Any]:
    """The parts of a plan that put a whole prompt into a row and compute it."""
    params = SamplingParams(**({"temperature": 0.0, "seed": 9} | sampling))
    return {
        "enter": (RowEnter(row, 5, prompt, len(prompt), 0, params),),
        "edits": (TableEdit(0, row, 0, tuple(range(first_block, first_block + 6))),),
        "work": (RowWork(row, 0, len(prompt), Want.TOKEN),),
    }


def go(runner: TorchRunner, **parts: Any) -> StepResult:
    return runner.collect(runner.launch(StepPlan(0, **parts)))


def generate(runner: TorchRunner, row: int, first_block: int, num: int, **sampling: Any) -> list[int]:
    """Prefill, decode and leave: `num` tokens."""
    ids = list(go(runner, **enter(row, first_block, **sampling)).rows[0].ids)
    for position in range(len(PROMPT), len(PROMPT) + num - 1):
        ids += go(runner, work=(RowWork(row, position, 1, Want.TOKEN),)).rows[0].ids
    go(runner, leave=(row,))
    return ids


def test_a_step_launched_before_the_last_was_collected_reads_its_token_from_the_device(folder: Path) -> None:
    expected = generate(start(folder), 0, 1, 6)
    runner = start(folder, overlap=True)
    assert runner.caps.overlaps
    steps = [runner.launch(StepPlan(0, **enter(0, 1)))]
    decodes = [RowWork(0, len(PROMPT) + i, 1, Want.TOKEN) for i in range(5)]
    steps += [runner.launch(StepPlan(i, work=(work,))) for i, work in enumerate(decodes, 1)]
    results = [runner.collect(step) for step in steps]
    assert [r.rows[0].ids[0] for r in results] == expected
    assert [r.id for r in results] == [0, 1, 2, 3, 4, 5] and results[0].rows[0].epoch == 5


def test_steps_are_collected_in_launch_order(folder: Path) -> None:
    runner = start(folder)
    runner.launch(StepPlan(0, **enter(0, 1)))
    second = runner.launch(StepPlan(1, **enter(1, 7)))
    with pytest.raises(AssertionError, match="launch order"):
        runner.collect(second)


def test_a_row_with_nan_fails_alone_and_poisons_no_block_it_leaves_behind(folder: Path) -> None:
    expected = generate(start(folder), 0, 1, 4)
    runner = start(folder)
    runner._decoder.embedding.weight[7] = torch.nan
    bad, good = enter(1, 1, prompt=(*range(10, 33), 7)), enter(0, 7)
    result = go(runner, **{key: bad[key] + good[key] for key in bad})
    assert [row for row, _ in result.failed] == [1] and "finite" in result.failed[0][1]
    assert [r.row for r in result.rows] == [0] and result.rows[0].ids == (expected[0],)
    go(runner, leave=(0, 1))
    # The next owner of the failed row's blocks ends before the NaN; its longer neighbour makes that slot be read.
    ids = list(go(runner, **enter(2, 1)).rows[0].ids)
    go(runner, **enter(3, 20, prompt=tuple(range(40, 70))))
    for step in range(3):
        work = (RowWork(2, len(PROMPT) + step, 1, Want.TOKEN), RowWork(3, 30 + step, 1, Want.TOKEN))
        result = go(runner, work=work)
        assert not result.failed
        ids += result.rows[0].ids
    assert ids == expected


def test_a_copied_block_continues_like_its_source(folder: Path) -> None:
    runner = start(folder)
    expected = generate(runner, 0, 1, 5)
    go(runner, **enter(0, 1))
    fork = go(
        runner,
        enter=(RowEnter(2, 1, PROMPT, len(PROMPT), len(PROMPT) - 1, SamplingParams(temperature=0.0, seed=1)),),
        edits=(TableEdit(0, 2, 0, (1, 2, 30, 31)),),
        copies=(Copy(0, 3, 30),),
        work=(RowWork(2, len(PROMPT) - 1, 1, Want.TOKEN),),
    )
    ids = list(fork.rows[0].ids)
    for position in range(len(PROMPT), len(PROMPT) + 4):
        ids += go(runner, work=(RowWork(2, position, 1, Want.TOKEN),)).rows[0].ids
    assert ids == expected


def test_masked_rows_wait_for_their_mask_and_obey_it(folder: Path) -> None:
    runner = start(folder)
    first, second = enter(0, 1), enter(1, 7, temperature=1.0)
    step = runner.launch(StepPlan(0, **{k: first[k] + second[k] for k in first}, masked=(0, 1)))
    words = np.zeros((2, 10), np.uint32)
    words[0, 255 // 32] = 1 << (255 % 32)
    words[1, 31 // 32] = 1 << 31
    runner.sample(step, {0: words[0], 1: words[1]})
    assert {r.row: r.ids for r in runner.collect(step).rows} == {0: (255,), 1: (31,)}


def test_bias_chooses_and_min_tokens_forbids_the_end(folder: Path) -> None:
    runner = start(folder)
    assert generate(runner, 0, 1, 3, logit_bias=((77, 100.0),)) == [77, 77, 77]
    eos = 2
    ended = generate(runner, 0, 1, 6, logit_bias=((eos, 100.0), (50, 90.0)), min_tokens=3)
    assert ended == [50, 50, 50, eos, eos, eos]
    stop = generate(runner, 0, 1, 3, logit_bias=((60, 100.0), (50, 90.0)), min_tokens=2, stop_token_ids=(60,))
    assert stop == [50, 50, 60]


def test_penalties_count_the_output_and_repetition_the_prompt_too(folder: Path) -> None:
    runner = start(folder)

    def flat(hidden: torch.Tensor) -> torch.Tensor:
        found = torch.full((hidden.shape[0], runner.caps.vocab_size), -5.0)
        found[:, 10], found[:, 200], found[:, 201] = 4.0, 3.5, 3.4
        return found

    runner._decoder.logits = flat  # type: ignore[method-assign]
    assert generate(runner, 0, 1, 3) == [10, 10, 10]
    assert generate(runner, 0, 1, 3, repetition_penalty=2.0) == [200, 201, 10], "10 is in the prompt: 4 / 2"
    assert generate(runner, 0, 1, 4, presence_penalty=0.55) == [10, 200, 10, 10]
    assert generate(runner, 0, 1, 4, frequency_penalty=0.55) == [10, 200, 10, 201]


@pytest.mark.parametrize(
    "ends",
    [{"top_p": 1e-6}, {"top_p": 1e-46}, {"top_p": 1e-300}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-5}],
    ids=str,
)
def test_the_narrow_end_of_each_cut_is_the_best_token(folder: Path, ends: dict[str, Any]) -> None:
    runner = start(folder)
    assert generate(runner, 0, 1, 6, **({"temperature": 1.0} | ends)) == generate(runner, 0, 1, 6)


def test_the_wide_end_of_each_value_reaches_the_device(folder: Path) -> None:
    runner = start(folder)
    wide = {"top_k": 2**31 - 1, "top_p": 1.0, "min_p": 0.0, "temperature": 2.0}
    plain = {"temperature": 2.0}
    assert generate(runner, 0, 1, 6, **wide) == generate(runner, 0, 1, 6, **plain)
    extremes = {"repetition_penalty": 0.01, "presence_penalty": -2.0, "frequency_penalty": 2.0, "min_tokens": 2**31 - 1}
    assert len(generate(runner, 0, 1, 6, **plain, **extremes)) == 6


def test_a_seed_gives_the_same_text_in_any_row_beside_any_neighbour(folder: Path) -> None:
    runner = start(folder)
    alone = generate(runner, 0, 1, 12, temperature=1.5, seed=2**63 + 5)
    go(runner, **enter(1, 20, prompt=(9, 8, 7), temperature=1.0, seed=1))
    assert generate(runner, 3, 8, 12, temperature=1.5, seed=2**63 + 5) == alone
    assert generate(runner, 3, 8, 12, temperature=1.5, seed=6) != alone


def test_logprobs_come_with_the_token_and_its_alternatives(folder: Path) -> None:
    runner = start(folder)
    parts = enter(0, 1, logprobs=3)
    parts["work"] = (RowWork(0, 0, len(PROMPT), Want.TOKEN | Want.TOP_LOGPROBS),)
    row = go(runner, **parts).rows[0]
    assert row.logprobs is not None
    (found,) = row.logprobs
    assert found.top[0] == (row.ids[0], pytest.approx(found.logprob)) and len(found.top) == 3
    assert sorted((v for _, v in found.top), reverse=True) == [v for _, v in found.top] and found.logprob < 0


def test_dummy_weights_run_and_depend_on_the_seed(folder: Path) -> None:
    first, again, other = (start(folder, load_format="dummy", seed=s) for s in (1, 1, 2))
    weights = [r._decoder.layers[0].attention.qkv.weight for r in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert len(generate(first, 0, 1, 3)) == 3


def test_memory_terms_sum_to_the_total(folder: Path) -> None:
    terms = start(folder).memory()
    assert is_accounted_for(terms)
    assert terms.weights_bytes > 0 and terms.kv_pool_bytes > 0 and terms.context_bytes > 0
    assert list(start(folder).start_seconds) == ["weights", "pack", "KV pool"]


def test_sizes_that_cannot_be_are_refused_with_the_numbers(folder: Path) -> None:
    with pytest.raises(StartError, match=r"9999.*2048"):
        start(folder, max_model_len=9999)
    with pytest.raises(StartError, match="the least to serve with is"):
        start(folder, num_gpu_blocks_override=None, kv_cache_memory_bytes=10)


@pytest.mark.parametrize(
    ("native", "kinds", "chosen"),
    [
        (True, {"F32"}, torch.float32),
        (True, {"F32", "Q4_1"}, torch.bfloat16),
        (True, {"BF16"}, torch.bfloat16),
        (False, {"BF16"}, torch.float32),
    ],
)
def test_auto_dtype_rounds_only_what_is_stored_narrow_and_says_so(
    native: bool,
    kinds: set[str],
    chosen: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(options_module, "has_native_bfloat16", lambda: native)
    with caplog.at_level("INFO"):
        assert resolve_dtype("auto", torch.device("cpu"), kinds) is chosen
    assert "--dtype auto: " + str(chosen).removeprefix("torch.") in caplog.text
    assert resolve_dtype("float32", torch.device("cpu"), kinds) is torch.float32
