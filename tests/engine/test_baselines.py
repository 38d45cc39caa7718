"""Every baseline gives the tokens of the engine as it is, and does what it is named for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.config import EngineConfig
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import StepPlan
from steelyard.engine.build import build_engine
from steelyard.engine.engine import Engine
from steelyard.engine.offline import run
from steelyard.engine.weighing import pools
from steelyard.errors import StartError
from steelyard.wire.messages import Deltas, Finished, Submit
from tests.equality.llama_rig import prompts, tiny_llama

LENS = (5, 40, 23, 61, 1, 30)
OUTPUTS = (12, 3, 20, 7, 15, 9)


@dataclass
class Ran:
    """Tokens by request, every plan, and the pool's use seen after each step."""

    tokens: dict[str, list[int]]
    plans: list[StepPlan]
    engine: Engine
    most_reserved: int = 0
    most_running: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(path)
    return path


def config(folder: Path, **changes: Any) -> EngineConfig:
    base: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 128,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 128,
        "block_size": 8,
        "num_gpu_blocks_override": 48,
        "skip_tokenizer_init": True,
        "check_invariants": True,
    }
    return EngineConfig(**(base | changes))


def serve(folder: Path, **changes: Any) -> Ran:
    """All requests at once through the engine; invariants hold after every step."""
    torch.set_num_threads(1)
    engine = build_engine(config(folder, **changes))
    ran = Ran({}, [], engine)
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: ran.plans.append(plan) or launch(plan)  # type: ignore[method-assign, func-returns-value]
    submits = [
        Submit(f"r{i}", tokens, SamplingParams(temperature=0.0, max_tokens=n, seed=1, ignore_eos=True))
        for i, (tokens, n) in enumerate(zip(prompts(LENS), OUTPUTS))
    ]
    for messages in run(engine, submits):
        ran.most_reserved = max(ran.most_reserved, pools(engine)[0].reserved_slots)
        ran.most_running = max(ran.most_running, engine.scheduler.num_running)
        for message in messages:
            for delta in message.items if isinstance(message, Deltas) else ():
                ran.tokens.setdefault(delta.id, []).extend(delta.ids)
    assert not engine.broken
    return ran


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Ran]:
    ran = serve(folder)
    assert [len(ran.tokens[f"r{i}"]) for i in range(len(OUTPUTS))] == list(OUTPUTS)
    yield ran


def joined_a_running_batch(ran: Ran) -> bool:
    return any(plan.enter and len(plan.work) > len(plan.enter) for plan in ran.plans)


def chunked(ran: Ran) -> bool:
    """Whether some prompt was computed in pieces: fewer new tokens than known ones when it entered."""
    known = {(p.id, e.row): len(e.tokens) - e.start for p in ran.plans for e in p.enter}
    first = {(p.id, w.row): w.num_new for p in ran.plans for w in p.work}
    return any(first[key] < length for key, length in known.items())


def no_cache(ran: Ran) -> None:
    assert all(work.start == 0 for plan in ran.plans for work in plan.work)
    assert max(w.num_new for p in ran.plans for w in p.work) == max(a + b for a, b in zip(LENS, OUTPUTS)) - 1


def static(ran: Ran) -> None:
    assert not joined_a_running_batch(ran)
    assert ran.engine.scheduler.held_slots > 0


def attention(name: str) -> Callable[[Ran], None]:
    def check(ran: Ran) -> None:
        assert ran.engine.runner.attention == name  # type: ignore[attr-defined]
        assert ran.engine.options.config["attention_backend"] == name

    return check


def whole(ran: Ran) -> None:
    assert not chunked(ran)


def reserved(ran: Ran) -> None:
    tables = {e.block_ids for p in ran.plans for e in p.edits}
    assert all(ids == tuple(range(ids[0], ids[0] + len(ids))) for ids in tables), "a run has a hole"
    assert all(edit.first_index == 0 for p in ran.plans for edit in p.edits), "a table grew"
    assert ran.most_reserved > 0


CASES: dict[str, tuple[dict[str, Any], Callable[[Ran], None]]] = {
    "kv cache off": ({"kv_cache": "off"}, no_cache),
    "kv cache off, overlapping": ({"kv_cache": "off", "async_scheduling": True}, no_cache),
    "static": ({"batching": "static", "batch_size": 2}, static),
    "dynamic": ({"batching": "dynamic", "batch_size": 4, "batch_timeout": 0.01}, static),
    "unchunked": ({"enable_chunked_prefill": False}, whole),
    "contiguous": ({"kv_allocation": "contiguous"}, reserved),
    "contiguous-max": ({"kv_allocation": "contiguous-max"}, reserved),
    "naive": ({"attention_backend": "naive"}, attention("naive")),
    "sdpa": ({"attention_backend": "sdpa"}, attention("sdpa")),
    "reference": ({"attention_backend": "reference"}, attention("reference")),
    "no cache and naive": ({"kv_cache": "off", "attention_backend": "naive"}, no_cache),
    "static, no cache, contiguous": (
        {"batching": "static", "kv_cache": "off", "kv_allocation": "contiguous", "attention_backend": "naive"},
        no_cache,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_baseline_gives_the_same_tokens_and_is_what_it_says(folder: Path, plain: Ran, name: str) -> None:
    changes, happened = CASES[name]
    ran = serve(folder, **changes)
    assert ran.tokens == plain.tokens
    happened(ran)


def test_without_a_baseline_prompts_are_chunked_joined_cached_and_paged(folder: Path) -> None:
    ran = serve(folder, max_num_batched_tokens=24)
    assert chunked(ran) and joined_a_running_batch(ran) and ran.engine.scheduler.held_slots == 0
    assert any(work.start > 0 for plan in ran.plans for work in plan.work)
    assert ran.engine.runner.attention == "cpu"  # type: ignore[attr-defined]


def test_reserving_the_context_lets_fewer_run_at_once_and_shows_as_reserved(folder: Path, plain: Ran) -> None:
    tight = serve(folder, kv_allocation="contiguous-max", num_gpu_blocks_override=33)
    assert tight.tokens == plain.tokens
    assert tight.most_running == 2 < plain.most_running == 3
    assert tight.most_reserved > 128 > plain.most_reserved


def test_a_batch_that_does_not_fill_starts_after_its_window(folder: Path, plain: Ran) -> None:
    ran = serve(folder, batching="static", batch_size=3, batch_timeout=0.01)
    assert ran.tokens == plain.tokens
    assert {len(plan.enter) for plan in ran.plans} == {0, 3}


@pytest.mark.parametrize(
    "changes", [{"enable_chunked_prefill": False}, {"kv_allocation": "contiguous"}, {"kv_allocation": "contiguous-max"}]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_what_takes_its_blocks_at_once_is_served_through_windows_too(
    folder: Path, rows: int, changes: dict[str, Any]
) -> None:
    bounded: dict[str, Any] = {"kv_window": 16, "max_num_seqs": rows, "num_gpu_blocks_override": None}
    in_chunks = serve(folder, **bounded, max_num_batched_tokens=16)
    assert chunked(in_chunks) and in_chunks.engine.runner.caps.num_blocks == (rows * 4,)  # 32 positions a row
    ran = serve(folder, **bounded, **changes)
    assert ran.tokens == in_chunks.tokens and not chunked(ran)
    assert ran.engine.scheduler.bound.tokens == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "--max-num-batched-tokens 64"),
        ({"kv_cache": "off", "max_num_batched_tokens": 64}, "a step must hold a whole request"),
        (
            {"kv_allocation": "contiguous-max", "num_gpu_blocks_override": 8},
            "128 tokens .* 64; .*--num-gpu-blocks-over",
        ),
        ({"attention_backend": "triton"}, "'triton'"),
        ({"attention_backend": "flashinfer"}, "'flashinfer'"),
        ({"batch_size": 4}, "--batch-size"),
        ({"batching": "static", "batch_timeout": 60.0}, "--batch-timeout must be 0 to 10"),
    ],
)
def test_an_impossible_choice_is_refused_by_name(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StartError, match=words):
        build_engine(config(folder, **changes))


def test_without_a_cache_what_is_computed_again_counts_as_such(folder: Path) -> None:
    engine = build_engine(config(folder, kv_cache="off"))
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    ends = [m for messages in run(engine, [Submit("r", [5] * 7, sampling)]) for m in messages]
    [usage] = [m.usage for m in ends if isinstance(m, Finished)]
    assert usage.computed_tokens == sum(range(7, 7 + 12)) == 7 + 12 - 1 + usage.recomputed_tokens


@pytest.mark.parametrize("changes", [{"kv_cache": "off"}, {"enable_chunked_prefill": False}], ids=str)
def test_a_tight_target_leaves_room_for_what_must_be_computed_whole(folder: Path, changes: dict[str, Any]) -> None:
    engine = build_engine(config(folder, scheduling_policy="slo", **changes))
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    submits = [Submit(f"r{i}", tokens, sampling, tpot_slo_ns=1) for i, tokens in enumerate(prompts(LENS))]
    ends = [m for messages in run(engine, submits) for m in messages if isinstance(m, Finished)]
    assert [m.reason for m in ends] == ["length"] * len(LENS)


def test_a_batch_that_comes_due_between_a_step_and_the_look_after_it_is_run(folder: Path) -> None:
    engine = build_engine(config(folder, batching="dynamic", batch_timeout=0.05))
    looks = count(engine.clock_ns(), 10_000_000)
    engine.clock_ns = lambda: next(looks)  # any look may be the first after the batch is due
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for start in range(6):
        for _ in range(start):
            next(looks)
        messages = [m for each in run(engine, [Submit(f"r{start}", [5, 6, 7], sampling)]) for m in each]
        assert any(isinstance(m, Finished) for m in messages)
