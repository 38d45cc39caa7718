"""The whole engine on a GPU: every family against transformers on the CPU, then what only a device's runner does.

Float32 throughout but where a name says otherwise, so that tokens are equal but for near-ties of the best two logits.
Heads are of the sizes that the Triton kernels have; the pruned families' are not, and take the eager path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from steelyard.checkpoint.find import open_checkpoint
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import Copy, RowWork, StepPlan, StepResult, Swap, Want
from steelyard.llm import LLM
from steelyard.runner.start import start_runner
from tests.equality.llama_rig import Cell, Ran, check_greedy, prompts, request, run, tiny_llama
from tests.equality.test_families import FAMILIES, ROPES, most_blocks_of_a_row, tiny
from tests.equality.test_pooling import check as check_pooled
from tests.equality.test_pooling import pooled
from tests.runner import test_bounded, test_device_together
from tests.runner.test_device_runner import SAMPLED, enter, go, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEVICE = "cuda"
TIE = 2e-3
GPU = Cell(budget=24, block_size=16, overlap=True, device=DEVICE)
SIZES: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 256, "initializer_range": 0.1}
Model = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("llama")
    return folder, tiny_llama(folder, **SIZES)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Layers of two KV groups, one of them with a window."""
    folder = tmp_path_factory.mktemp("gemma")
    return folder, tiny(folder, *sized("gemma3"))


@pytest.fixture
def model(name: str, request: pytest.FixtureRequest) -> Model:
    found: Model = request.getfixturevalue(name)
    return found


def sized(name: str, head_dim: int = 64) -> tuple[str, dict[str, Any]]:
    """A family with heads that the kernels have; the pruned ones keep theirs."""
    architecture, fields = FAMILIES[name]
    if "pruned" in name:
        return architecture, fields
    fields = {**SIZES, **fields, "hidden_size": 6 * head_dim}
    return architecture, fields | ({"head_dim": head_dim} if "head_dim" in fields else {})


def check_captured(ran: Ran, attention: str = "triton") -> None:
    """The kernels asked for ran, and from graphs."""
    runner: Any = ran.simulation.runner
    assert runner.attention == attention
    kinds = {kind for kind, _ in runner._machine.graphs}
    assert kinds == ({"decode", "mixed", "head", "cut"} if attention == "triton" else set())
    assert ran.simulation.max_in_flight == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_transformers(tmp_path: Path, name: str) -> None:
    oracle = tiny(tmp_path, *sized(name))
    requests = [request(f"r{i}", p, 30) for i, p in enumerate(prompts((5, 33, 16, 70)))]
    ran = run(tmp_path, GPU, requests)
    assert check_greedy(oracle, ran, TIE) < 4
    assert ran.scheduler.counters.prefill_chunks > 4
    check_captured(ran, "sdpa" if "pruned-heads" in name else "triton")
    windows = [(i, g.window) for i, g in enumerate(ran.simulation.runner.caps.groups) if g.window is not None]
    assert bool(windows) == bool(FAMILIES[name][1].get("sliding_window"))
    for group, window in windows:
        assert 0 < most_blocks_of_a_row(ran, group) <= -(-(window + GPU.budget) // GPU.block_size) + 2


@pytest.mark.parametrize("name", ROPES)
def test_rotary_scheme_equals_transformers(tmp_path: Path, name: str) -> None:
    oracle = tiny(tmp_path, "Llama", {**SIZES, "rope_parameters": ROPES[name]})
    requests = [request(f"r{i}", p, 30) for i, p in enumerate(prompts((5, 33, 70)))]
    assert check_greedy(oracle, run(tmp_path, GPU, requests), TIE) < 4


@pytest.mark.parametrize(
    "changes",
    [{"overlap": False}, {"budget": 512}, {"block_size": 64}, {"block_size": 128, "budget": 200}, {"max_rows": 1}],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_however_it_is_run(model: Model, changes: dict[str, Any]) -> None:
    folder, oracle = model
    requests = [request(f"r{i}", p, 9 + 3 * i) for i, p in enumerate(prompts((1, 15, 16, 17, 32, 47, 150)))]
    check_greedy(oracle, run(folder, replace(GPU, **changes), requests), TIE)


@pytest.mark.parametrize(
    ("name", "head_dim"), [("llama-bias", 64), ("llama-bias", 128), ("gemma2", 256), ("qwen3-moe", 128)]
)
def test_bfloat16_is_near_float32(tmp_path: Path, name: str, head_dim: int) -> None:
    """Long prompts over blocks of 64: the tensor-memory kernels. The prompts' likelihood is the reference's."""
    tiny(tmp_path, *sized(name, head_dim))
    requests = prompts((200, 9, 130))
    found = []
    for device, dtype in (("cpu", "float32"), (DEVICE, "bfloat16")):
        llm = LLM(str(tmp_path), device=device, dtype=dtype, skip_tokenizer_init=True, num_gpu_blocks_override=32)
        outputs = llm.generate(requests, SamplingParams(max_tokens=1, prompt_logprobs=0))
        found.append([[p.logprob for p in out.prompt_logprobs or () if p is not None] for out in outputs])
    exact, narrow = (torch.tensor([p for prompt in each for p in prompt]) for each in found)
    assert len(exact) == 336 and not torch.equal(exact, narrow)
    assert (exact - narrow).abs().mean() < 0.05 * exact.abs().mean()


# what happens to requests


def test_prefix_hits_forks_and_preemption(llama: Model) -> None:
    folder, oracle = llama
    first = [request("a", prompts((48,), shared=48)[0])]
    again = [request(f"b{i}", p) for i, p in enumerate(prompts((48, 49, 60, 40), shared=40))]
    parent = request("f", prompts((19,))[0])
    forks = [parent, *(request("f", parent.tokens, index=i, fork_of=parent) for i in (1, 2))]
    ran = run(folder, replace(GPU, budget=512, num_blocks=14), first, [*again, *forks])
    check_greedy(oracle, ran, TIE)
    counters = ran.scheduler.counters
    assert counters.prefix_hits_tokens > 0 and counters.forks > 0 and counters.preemptions > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_swapped_and_resumed(model: Model, overlap: bool) -> None:
    folder, oracle = model
    cell = replace(GPU, budget=512, num_blocks=10, max_model_len=96, swap_space_bytes=1 << 24, overlap=overlap)
    ran = run(folder, cell, [request(f"r{i}", p, 36) for i, p in enumerate(prompts((20, 33, 16, 31)))])
    check_greedy(oracle, ran, TIE)
    counters = ran.scheduler.counters
    assert counters.swaps_out == counters.swaps_in == counters.preemptions > 0 and counters.recomputed_tokens == 0


def test_an_evicted_prefix_is_copied_back(llama: Model) -> None:
    folder, oracle = llama
    waves = [[request(f"{wave}{i}", p, 8) for i, p in enumerate(prompts((60, 61, 62, 63)))] for wave in "ab"]
    ran = run(folder, replace(GPU, num_blocks=12, max_model_len=96, swap_space_bytes=1 << 24), *waves)
    check_greedy(oracle, ran, TIE)
    assert ran.scheduler.counters.host_hits_tokens > 0


def test_sampled_tokens_are_those_of_the_plain_runner(llama: Model) -> None:
    def requests() -> list[Any]:
        kinds = [SAMPLED[i % len(SAMPLED)] for i in range(7)]
        return [request(f"r{i}", p, 12, **kinds[i]) for i, p in enumerate(prompts((5, 9, 20, 3, 30, 11, 8)))]

    expected = run(llama[0], Cell(budget=24, backend="reference"), requests())
    ran = run(llama[0], GPU, requests())
    assert ran.outputs == expected.outputs
    judged, twin = (next(r for r in one.requests if r.sampling.prompt_logprobs is not None) for one in (ran, expected))
    assert len(judged.prompt_logprobs) == judged.prompt_len - 1
    for ours, theirs in zip(judged.prompt_logprobs, twin.prompt_logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_vectors_are_transformers_hidden_states(llama: Model) -> None:
    folder, oracle = llama
    requests = [
        pooled(f"{kind.name}{n}", prompts((n,))[0], kind) for kind in (Want.POOL_LAST, Want.POOL_MEAN) for n in (5, 47)
    ]
    text = request("text", prompts((20,))[0], 12)
    ran = run(folder, GPU, [*requests[:2], text, *requests[2:]])
    check_pooled(oracle, [r for r in ran.requests if r.pooling], 1e-3)
    assert len(ran.outputs[("text", 0)]) == 12


def test_bounded_kv_is_a_twin_that_masks(llama: Model) -> None:
    folder, twin = llama[0], tiny_llama(llama[0], **SIZES).double()
    first = [request(f"r{i}", p, max_tokens=30) for i, p in enumerate(prompts((3, 20, 70, 150)))]
    again = [request("h", [*first[3].tokens[:144], 7, 8, 9], max_tokens=20)]
    ran = test_bounded.serve(folder, first, again, device=DEVICE, block_size=16, max_num_batched_tokens=40)
    for one in (*first, *again):
        test_bounded.check_greedy(twin, ran, one, TIE)
    assert ran.scheduler.counters.prefix_hits_tokens >= 128 and ran.simulation.runner._machine.graphs  # type: ignore[attr-defined]


def prompt_logprobs(llm: LLM) -> torch.Tensor:
    outputs = llm.generate(prompts((100, 33)), SamplingParams(max_tokens=1, prompt_logprobs=0))
    return torch.tensor([p.logprob for out in outputs for p in out.prompt_logprobs or () if p is not None])


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_an_fp8_pool_rounds_as_on_the_cpu(model: Model) -> None:
    """In chunks, so that what was rounded is read back: far nearer to the CPU's fp8 than that is to float32."""
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 32}
    options |= {"max_num_batched_tokens": 16, "block_size": 16, "max_num_seqs": 4}
    exact, cpu = (
        prompt_logprobs(LLM(str(model[0]), device="cpu", kv_cache_dtype=kv, **options)) for kv in ("auto", "fp8")
    )
    gpu = prompt_logprobs(LLM(str(model[0]), device=DEVICE, kv_cache_dtype="fp8", **options))
    rounding = float((cpu - exact).abs().mean())
    assert rounding > 0 and float((gpu - cpu).abs().mean()) < 0.3 * rounding


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_guesses_are_not_seen_in_what_comes_out(llama: Model, temperature: float, kv: str) -> None:
    sampling = SamplingParams(
        temperature=temperature, seed=5, max_tokens=90, ignore_eos=True, logit_bias=((5, 60.0), (6, 60.0))
    )
    options: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "max_num_seqs": 4, "skip_tokenizer_init": True}
    options |= {"num_gpu_blocks_override": 40, "kv_cache_dtype": kv}
    outputs = []
    for guesses in (0, 4):
        llm = LLM(str(llama[0]), num_speculative_tokens=guesses, speculative_load=10, **options)
        outputs.append(llm.generate([[7, 8, 9, 10, 11] * 6, [3, 4, 5] * 4], sampling))
    counters = llm.engine.scheduler.counters
    assert counters.draft_tokens >= counters.accepted_tokens > 10
    ids = [[o.outputs[0].token_ids for o in each] for each in outputs]
    assert ids[0] == ids[1]


# what goes wrong


@pytest.mark.parametrize("eager", [False, True])
def test_a_row_that_is_not_finite_fails_alone(llama: Model, eager: bool) -> None:
    runner = start(llama[0], device=DEVICE, backend="auto", enforce_eager=eager)
    with torch.inference_mode():
        runner._machine.decoder.embedding.weight[7] = torch.nan
    bad, good = enter(1, 1, (3, 7, 4)), enter(0, 7, (5, 6, 8))
    result = go(runner, **{key: bad[key] + good[key] for key in bad})
    assert [row for row, _ in result.failed] == [1] and "finite" in result.failed[0][1]
    assert [r.row for r in result.rows] == [0] and len(result.rows[0].ids) == 1


def test_memory_that_runs_out_fails_the_step_it_ran_out_in(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = go(start(llama[0], device=DEVICE, backend="auto"), **enter(0, 1, (5, 6, 8))).rows[0].ids
    runner = start(llama[0], device=DEVICE, backend="auto", enforce_eager=True)
    with monkeypatch.context() as patch:
        patch.setattr(runner._machine.step, "forward", lambda *_: torch.empty(1 << 45, device=DEVICE))
        result = go(runner, **enter(1, 7, (5, 6, 8)))
    assert not result.rows and result.failed[0][0] == 1 and "out of memory" in result.failed[0][1]
    assert go(runner, leave=(1,), **enter(0, 1, (5, 6, 8))).rows[0].ids == expected


def test_nothing_waits_or_allocates_in_a_decode_step(llama: Model) -> None:
    """torch raises on a synchronisation in launch; the allocator's count does not grow over a hundred steps."""
    runner = start(llama[0], device=DEVICE, backend="auto", max_num_batched_tokens=128)
    go(runner, **enter(0, 1, (5, 6, 8)))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for position in range(3, 90):
            step = runner.launch(StepPlan(position, work=(RowWork(0, position, 1, Want.TOKEN),)))
            torch.cuda.set_sync_debug_mode("default")
            assert len(runner.collect(step).rows) == 1
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """torch raises on an operator that waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def everything(runner: Any, leave: tuple[int, ...]) -> list[StepResult]:
    """Two steps of all that is not a plain decode, launched without waiting."""
    rows = [
        enter(0, 1, (5, 6, 8), logprobs=3, prompt_logprobs=2, repetition_penalty=1.3, temperature=1.0, top_k=5),
        enter(1, 7, (9, 4, 2)),
        enter(2, 13, (5, 6, 5, 6, 5, 6), temperature=1.0, logit_bias=((5, 60.0),)),
        enter(3, 19, (3, 3, 3)),
    ]
    judged = Want.TOKEN | Want.TOP_LOGPROBS
    wants = (judged | Want.PROMPT_LOGPROBS, Want.POOL_MEAN, Want.TOKEN, Want.TOKEN)
    first = {key: tuple(part for row in rows for part in row[key]) for key in ("enter", "edits")}
    work = tuple(row["work"][0]._replace(want=want) for row, want in zip(rows, wants, strict=True))
    with waiting_forbidden():
        step = runner.launch(StepPlan(0, **first, leave=leave, work=work, masked=(3,), swaps=(Swap(0, 30, 1, True),)))
        runner.sample(step, {3: np.full(-(-runner.caps.vocab_size // 32), -1, np.int32)})
    results = [runner.collect(step)]
    work = (RowWork(0, 3, 1, judged), RowWork(2, 6, 4, Want.TOKEN, 3, 1))
    swaps = (Swap(0, 31, 2, True), Swap(0, 32, 1, False))
    with waiting_forbidden():
        step = runner.launch(StepPlan(1, work=work, swaps=swaps, copies=(Copy(0, 1, 33),), num_drafts=3))
    return [*results, runner.collect(step)]


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_nothing_waits_in_steps_that_do_everything_else(llama: Model, kv: str) -> None:
    """Guesses, penalties, masks, log-probabilities, vectors, swaps and copies; the second time all is compiled."""
    runner = start(llama[0], device=DEVICE, backend="auto", kv_cache_dtype=kv, overlap=False, swap_space_bytes=1 << 24)
    once, again = everything(runner, ()), everything(runner, (0, 1, 2, 3))
    for steps in (once, again):
        assert not any(step.failed for step in steps)
        assert {row.row: len(row.ids) for row in steps[0].rows} == {0: 1, 1: 0, 2: 1, 3: 1}
        assert len(steps[0].pooled[1]) == SIZES["hidden_size"] and len(steps[0].prompt_logprobs[0]) == 2
        assert len(steps[1].rows) == 2 and 1 <= len(steps[1].rows[1].ids) <= 4
    assert [[row.ids for row in step.rows] for step in once] == [[row.ids for row in step.rows] for step in again]


@pytest.mark.parametrize("is_bounded", [False, True])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_guesses_swaps_bounds_and_an_fp8_pool_at_once(llama: Model, kv: str, is_bounded: bool) -> None:
    """The judge has room for all and guesses nothing. Other shapes round otherwise, and fp8 makes steps of that."""
    sizes: dict[str, Any] = {"device": DEVICE, "backend": "auto", "block_size": 16, "max_num_batched_tokens": 40}
    checkpoint = open_checkpoint(str(llama[0]))

    def served(num_blocks: int, guesses: int, **more: Any) -> tuple[Any, Any, Any]:
        options = replace(test_device_together.options_of(kv, is_bounded, num_blocks), **sizes, **more)
        return test_device_together.serve(start_runner(checkpoint, options), guesses)

    expected, calm, _ = served(64, 0)
    assert calm.preemptions == calm.draft_tokens == 0
    for guesses in (0, 4):
        found, counters, results = served(8, guesses, swap_space_bytes=1 << 24, overlap=not guesses)
        assert found == expected or (kv == "fp8" and {k: len(v) for k, v in found.items()} == dict.fromkeys(found, 40))
        assert counters.swaps_out == counters.swaps_in == counters.preemptions > 0
        assert {r.timing.graph.split(" ")[0] for r in results} == {"decode", "mixed"}
        assert (counters.accepted_tokens > 10) == bool(guesses)
