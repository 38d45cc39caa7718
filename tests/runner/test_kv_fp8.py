"""An fp8 KV cache in the runner: bytes in plan, pool and ledger, where scales come from, the keys of its blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from steelyard.checkpoint.find import open_checkpoint
from steelyard.core.hashing import root_hash
from steelyard.core.sampling import SamplingParams
from steelyard.core.step import Copy, RowEnter, RowWork, StepPlan, TableEdit, Want
from steelyard.engine.measures import block_bytes
from steelyard.errors import CheckpointError, StartError
from steelyard.kernels.gpu import gpu_of_arch
from steelyard.kernels.kv_fp8 import FP8, FP8_MAX, key_growth
from steelyard.plan.memory import KvPools
from steelyard.plan.shape import ModelShape
from steelyard.runner import start_device
from steelyard.runner.options import RunnerOptions, resolve_kv_dtype
from steelyard.runner.runner import TorchRunner
from steelyard.runner.start import start_runner
from tests import tiny_model
from tests.runner.test_runner import BLOCK, PROMPT, enter, generate, go, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("fp8") / "tiny")


def sized(folder: Path, dtype: str, kv: str, num_bytes: int) -> TorchRunner:
    options = RunnerOptions(
        device="cpu", dtype=dtype, kv_cache_dtype=kv, kv_cache_memory_bytes=num_bytes, block_size=BLOCK, max_num_seqs=64
    )
    return start_runner(open_checkpoint(str(folder)), options)  # type: ignore[return-value]


def test_bytes_halve_in_plan_pool_and_ledger_and_blocks_double(folder: Path) -> None:
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
    planned = {size: KvPools.of(shape, BLOCK, size) for size in (1, 2)}
    assert planned[2].block_bytes == (2 * planned[1].block_bytes[0],)
    room = planned[2].bytes_at(100)
    wide, narrow = sized(folder, "bfloat16", "auto", room), sized(folder, "bfloat16", "fp8", room)
    assert wide.caps.num_blocks == (100,) and narrow.caps.num_blocks == (201,)  # and the null block takes half as well
    assert wide.memory().kv_pool_bytes == room == narrow.memory().kv_pool_bytes
    assert wide._kv.nbytes == room == planned[1].bytes_at(201)
    assert all(layer.k.dtype == layer.v.dtype == FP8 for layer in narrow._kv.layers)
    of = [block_bytes(shape, runner.caps) for runner in (wide, narrow)]
    assert of == [planned[2].block_bytes, planned[1].block_bytes]


def test_keys_of_blocks_name_the_dtype_they_are_held_in(folder: Path) -> None:
    caps = [start(folder, kv_cache_dtype=kv).caps for kv in ("auto", "fp8")]
    assert [c.kv_layout for c in caps] == [f"float32/float32/{BLOCK}", f"float32/fp8/hadamard/{BLOCK}"]
    assert root_hash("m", caps[0].kv_layout) != root_hash("m", caps[1].kv_layout)


def test_scales_are_calibrated_per_head_hold_what_is_computed_and_repeat(folder: Path) -> None:
    runner, again = (start(folder, kv_cache_dtype="fp8") for _ in range(2))
    generate(runner, 0, 1, 8)
    for layer, other in zip(runner._kv.layers, again._kv.layers):
        for pool, scale, same in ((layer.k, layer.k_scale, other.k_scale), (layer.v, layer.v_scale, other.v_scale)):
            assert scale is not None and same is not None and torch.equal(scale, same)
            assert scale.shape == (2,) and torch.equal(torch.log2(scale), torch.log2(scale).round())
            largest = pool.float().abs().amax(dim=(0, 2, 3))
            assert (largest > FP8_MAX / 64).all() and (largest < FP8_MAX).all()


def test_tokens_are_the_same_in_chunks_and_after_a_fork(folder: Path) -> None:
    runner = start(folder, kv_cache_dtype="fp8")
    expected = generate(runner, 0, 1, 6)
    first = enter(1, 7) | {"work": (RowWork(1, 0, 7, Want.NOTHING),)}
    go(runner, **first)
    go(runner, work=(RowWork(1, 7, 9, Want.NOTHING),))
    ids = list(go(runner, work=(RowWork(1, 16, 4, Want.TOKEN),)).rows[0].ids)
    fork = RowEnter(2, 1, PROMPT, len(PROMPT), len(PROMPT) - 1, SamplingParams(temperature=0.0, seed=1))
    edits = (TableEdit(0, 2, 0, (7, 8, 30, 31)),)
    copied = go(
        runner, enter=(fork,), edits=edits, copies=(Copy(0, 9, 30),), work=(RowWork(2, 19, 1, Want.TOKEN),)
    ).rows[0]
    forked = list(copied.ids)
    for position in range(len(PROMPT), len(PROMPT) + 5):
        step = go(runner, work=tuple(RowWork(row, position, 1, Want.TOKEN) for row in (1, 2)))
        ids += step.rows[0].ids
        forked += step.rows[1].ids
    assert ids == forked == expected


def test_a_checkpoint_that_has_scales_is_served_with_them(folder: Path, tmp_path: Path) -> None:
    own = tiny_model.write(tmp_path / "own")
    weights = load_file(own / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.{which}_scale" for i in range(2) for which in "kv"]
    save_file(weights | {n: torch.tensor(0.01 * (i + 1)) for i, n in enumerate(names)}, own / "model.safetensors")
    layers = start(own, kv_cache_dtype="fp8")._kv.layers
    found = [s.tolist() for layer in layers for s in (layer.k_scale, layer.v_scale) if s is not None]
    room = (key_growth(layers[0].k.shape[-1]), 1.0)
    assert room[0] > 1 and found == [pytest.approx([0.01 * (i + 1) * room[i % 2]] * 2) for i in range(4)]
    assert generate(start(own), 0, 1, 6) == generate(start(folder), 0, 1, 6)  # and without it they are left alone
    for bad, message in (({names[0]: torch.tensor(0.0)}, "above 0"), ({names[0]: torch.ones(2)}, "one number")):
        save_file(weights | bad, own / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            start(own, kv_cache_dtype="fp8")
    save_file(weights | {names[0]: torch.tensor(0.5)}, own / "model.safetensors")
    with pytest.raises(CheckpointError, match="not both of layer 0"):
        start(own, kv_cache_dtype="fp8")


def test_the_device_runner_holds_the_same_pool_and_says_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = start(folder, kv_cache_dtype="fp8")
    options = RunnerOptions(
        device="cpu", backend="reference", kv_cache_dtype="fp8", block_size=BLOCK, num_gpu_blocks_override=40,
        max_num_seqs=4,
    )  # fmt: skip
    runner: Any = start_device.start_device_runner(open_checkpoint(str(folder)), options)
    assert replace(runner.caps, overlaps=False, checks_drafts=True) == plain.caps
    assert "KV scales" in runner.start_seconds
    assert runner.memory().kv_pool_bytes == plain.memory().kv_pool_bytes
    for layer, other in zip(runner._machine.kv.layers, plain._kv.layers):
        assert torch.equal(layer.k_scale, other.k_scale) and torch.equal(layer.v_scale, other.v_scale)
    ids = [generate(r, 0, 1, 5) for r in (runner, plain)]
    assert ids[0] == ids[1] and len(ids[0]) == 5
    assert runner.collect(runner.launch(StepPlan(9))).rows == ()


def test_attention_that_reads_no_fp8_pool_is_refused_with_what_to_do(folder: Path) -> None:
    with pytest.raises(StartError, match=r"fp8.*'naive'.*use --attention-backend auto"):
        start(folder, kv_cache_dtype="fp8", attention_backend="naive")
    options, gpu = RunnerOptions(kv_cache_dtype="fp8"), gpu_of_arch("sm_90")
    with pytest.raises(StartError, match=r"fp8.*'sdpa'.*use --kv-cache-dtype auto"):
        resolve_kv_dtype(options, torch.bfloat16, gpu, "sdpa")  # heads that the Triton kernels do not have
