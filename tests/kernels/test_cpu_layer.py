"""A layer of one token as one operator against the same layer out of its parts, and the steps it leaves to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from steelyard.kernels.attention import AttnSpec, Batch, KvLayer
from steelyard.kernels.backend import LayerParts, WholeLayers
from steelyard.kernels.cpu import CpuBackend
from steelyard.kernels.cpu_layer import OneTokenLayer
from steelyard.kernels.cpu_linear import pack
from steelyard.kernels.cpu_products import FEW
from tests.equality.llama_rig import Cell, check_greedy, prompts, request, run, tiny_llama
from tests.kernels.test_cpu import problem
from tests.kernels.test_cpu_fused import near
from tests.kernels.test_cpu_linear import quantised

HEADS = (6, 2, 16)
HIDDEN, INNER = 64, 96
SPEC = AttnSpec(scale=0.25)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The number of threads is the same after a test as before it."""
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def parts_of(dtype: torch.dtype, bits: int, spec: AttnSpec, activation: str = "silu") -> LayerParts:
    """Random weights; bits 0: not quantised."""

    def weight(num_rows: int, num_inputs: int) -> object:
        values, stored = quantised(num_rows, num_inputs, bits or 4)
        return pack(values.to(dtype), [stored] if bits else [])

    num_q, num_kv, dim = HEADS
    return LayerParts(
        before_attn=torch.rand(HIDDEN) + 0.5,
        qkv=weight((num_q + 2 * num_kv) * dim, HIDDEN),
        out=weight(HIDDEN, num_q * dim),
        before_mlp=torch.rand(HIDDEN) + 0.5,
        gate_up=weight(2 * INNER, HIDDEN),
        down=weight(HIDDEN, INNER),
        eps=1e-5,
        heads=HEADS,
        activation=activation,
        spec=spec,
    )


def by_parts(parts: LayerParts, stream: Tensor, kv: KvLayer, batch: Batch, cos_sin: Tensor) -> Tensor:
    """The layer out of CpuFusions and CpuAttention."""
    backend, norms = CpuBackend(), ((parts.before_attn, parts.eps), (parts.before_mlp, parts.eps))
    assert backend.fusions is not None
    backend.attention.prepare(batch)
    qkv = backend.fusions.product(stream, parts.qkv, norm=norms[0])
    backend.fusions.turn_and_write(qkv, HEADS, cos_sin, None, kv, batch.slots[0])
    q = qkv.view(len(stream), -1, HEADS[2])[:, : HEADS[0]]
    out = torch.empty_like(q)
    backend.attention.forward(q, None, None, kv, batch, parts.spec, out)
    backend.fusions.product(out.flatten(1), parts.out, add_to=stream)
    inner = backend.fusions.product(stream, parts.gate_up, norm=norms[1], activation=parts.activation)
    return backend.fusions.product(inner, parts.down, add_to=stream)


@dataclass(frozen=True)
class Case:
    """A layer, its step, and a pool for each of the two ways."""

    backend: CpuBackend
    parts: LayerParts
    pools: tuple[KvLayer, KvLayer]
    batch: Batch
    stream: Tensor
    cos_sin: Tensor

    def whole(self) -> bool:
        fusions = self.backend.fusions
        assert isinstance(fusions, WholeLayers)
        layer = fusions.layer(self.parts)
        assert layer is not None
        self.backend.attention.prepare(self.batch)
        return layer(self.stream, self.pools[0], self.batch, self.cos_sin)


def case(rows: list[tuple[int, int]], parts: LayerParts, dtype: torch.dtype, rotated: int = 16) -> Case:
    _, _, _, kv, batch = problem(rows, HEADS, 16, dtype)
    assert kv.k._base is not None
    other = kv.k._base.clone()
    pools = kv, KvLayer(other[:, 1, 0], other[:, 1, 1], 16)
    cos_sin = torch.randn(batch.num_tokens, rotated)
    return Case(CpuBackend(), parts, pools, batch, torch.randn(batch.num_tokens, HIDDEN), cos_sin)


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("context", [1, 16, 37])
def test_one_token_goes_through_as_through_the_parts(context: int, dtype: torch.dtype, bits: int) -> None:
    found = case([(1, context)], parts_of(dtype, bits, SPEC), dtype)
    expected = by_parts(found.parts, found.stream.clone(), found.pools[1], found.batch, found.cos_sin)
    assert found.whole()
    assert near(found.stream, expected, dtype)
    assert near(found.pools[0].k, found.pools[1].k, dtype) and torch.equal(found.pools[0].v, found.pools[1].v)


@pytest.mark.parametrize("window", [1, 20])
@pytest.mark.parametrize("keep_first", [0, 4])
def test_windows_partial_rotations_and_gelu(window: int, keep_first: int) -> None:
    spec = replace(SPEC, window=window, keep_first=keep_first)
    found = case([(1, 70)], parts_of(torch.float32, 0, spec, "gelu_tanh"), torch.float32, rotated=8)
    expected = by_parts(found.parts, found.stream.clone(), found.pools[1], found.batch, found.cos_sin)
    assert found.whole()
    assert near(found.stream, expected, torch.float32)


@pytest.mark.parametrize(
    ("context", "spec"), [(FEW, SPEC), (9, replace(SPEC, softcap=3.0))], ids=["many keys", "softcap"]
)
def test_attention_that_is_no_small_matter_is_the_backends(context: int, spec: AttnSpec) -> None:
    found = case([(1, context)], parts_of(torch.float32, 0, spec), torch.float32)
    expected = by_parts(found.parts, found.stream.clone(), found.pools[1], found.batch, found.cos_sin)
    assert found.whole()
    assert near(found.stream, expected, torch.float32)


@pytest.mark.parametrize("rows", [[(1, 9), (1, 20)], [(2, 9)]], ids=["two rows", "two tokens"])
def test_other_steps_are_left_as_they_are(rows: list[tuple[int, int]]) -> None:
    found = case(rows, parts_of(torch.float32, 0, SPEC), torch.float32)
    before = found.stream.clone()
    assert not found.whole()
    assert torch.equal(found.stream, before) and torch.equal(found.pools[0].k, found.pools[1].k)


def test_padding_and_pools_that_do_not_lie_side_by_side_are_left_as_they_are() -> None:
    found = case([(1, 9)], parts_of(torch.float32, 0, SPEC), torch.float32)
    assert not replace(found, batch=replace(found.batch, slots=(torch.tensor([-1]),))).whole()
    apart = KvLayer(found.pools[0].k.clone(), found.pools[0].v.clone(), 16)
    assert not replace(found, pools=(apart, found.pools[1])).whole()
    assert found.whole()


def test_layers_are_arranged_anew_for_every_step() -> None:
    parts = parts_of(torch.float32, 0, SPEC)
    first, second = (case([(1, context)], parts, torch.float32) for context in (9, 33))
    second = replace(second, backend=first.backend)
    for found in (first, second):
        expected = by_parts(parts, found.stream.clone(), found.pools[1], found.batch, found.cos_sin)
        assert found.whole()
        assert near(found.stream, expected, torch.float32)


def test_a_request_alone_decodes_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, real = [], OneTokenLayer.__call__
    monkeypatch.setattr(OneTokenLayer, "__call__", lambda *given: taken.append(real(*given)) or taken[-1])
    oracle = tiny_llama(tmp_path, seed=3)
    requests = [request("alone", prompts((37,))[0], max_tokens=40)]
    ran = run(tmp_path, Cell(), requests)
    torch.set_num_threads(2)
    check_greedy(oracle, ran)
    assert taken.count(True) == 39 * 3 and taken.count(False) == 3  # three layers; the prompt is no single token
