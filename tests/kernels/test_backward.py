"""The Triton training kernels against float64 autograd of the plain formula, in Triton's interpreter on the CPU.

`make test-gpu` runs the same checks in bfloat16 on a device, and repeats the gradient bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from steelyard.errors import InvalidRequest
from steelyard.kernels import flash_attention
from steelyard.kernels.flash_autograd import FlashSpec, dropout_threshold

torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """Lengths of queries and keys of each sequence, heads, head size, and the operator."""

    num_q: tuple[int, ...]
    num_k: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    spec: FlashSpec

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Packed q, k, v and an upstream gradient."""
        generator = torch.Generator().manual_seed(7)
        sizes = [
            (sum(self.num_q), self.heads[0]),
            *[(sum(self.num_k), self.heads[1])] * 2,
            (sum(self.num_q), self.heads[0]),
        ]
        q, k, v, g = (torch.randn(*s, self.head_dim, generator=generator).to(device, dtype) for s in sizes)
        return q, k, v, g

    def cu_seqlens(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        q, k = (torch.tensor([0, *np.cumsum(n)], dtype=torch.int32, device=device) for n in (self.num_q, self.num_k))
        return q, k


CASES = {
    "causal, odd": Case((37,), (37,), (2, 2), 16, FlashSpec(causal=True)),
    "full, queries != keys": Case((33,), (70,), (1, 1), 24, FlashSpec(scale=0.3)),
    "GQA, packed": Case((5, 34, 1), (5, 40, 33), (4, 2), 16, FlashSpec(causal=True)),
    "window narrower than a tile": Case((70,), (70,), (1, 1), 16, FlashSpec(causal=True, window=9)),
    "window wider than a tile": Case((100,), (131,), (1, 1), 16, FlashSpec(causal=True, window=70)),
    "window, not causal": Case((40,), (40,), (1, 1), 16, FlashSpec(window=35)),
    "one query": Case((1, 1), (33, 7), (2, 1), 16, FlashSpec(causal=True)),
    "empty sequences": Case((0, 9, 0), (4, 9, 0), (1, 1), 16, FlashSpec(causal=True)),
    "rows that see nothing": Case((40,), (13,), (2, 1), 16, FlashSpec(causal=True)),
}


def plain(q: Tensor, k: Tensor, v: Tensor, case: Case, keep: dict[int, Tensor] | None = None) -> Tensor:
    """The formula, one sequence at a time; `keep` holds a dropout mask [H, Sq, Sk] a sequence."""
    out, at_q, at_k = [], 0, 0
    group = case.heads[0] // case.heads[1]
    scale = case.spec.scale or case.head_dim**-0.5
    for s, (num_q, num_k) in enumerate(zip(case.num_q, case.num_k)):
        queries = q[at_q : at_q + num_q]
        keys, values = (x[at_k : at_k + num_k].repeat_interleave(group, 1) for x in (k, v))
        position = torch.arange(num_q, device=q.device)[:, None] + num_k - num_q
        key = torch.arange(num_k, device=q.device)[None, :]
        seen = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device)
        if case.spec.causal:
            seen &= key <= position
        if case.spec.window is not None:
            seen &= key > position - case.spec.window
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        weights = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
        if keep is not None:
            weights = weights * keep[s] / (1 - case.spec.dropout_p)
        out.append(torch.einsum("hqk,khd->qhd", weights, values))
        at_q, at_k = at_q + num_q, at_k + num_k
    return torch.cat(out)


def relative_errors(
    case: Case, dtype: torch.dtype, device: str = "cpu", keep: dict[int, Tensor] | None = None
) -> dict[str, float]:
    """||ours - float64|| / ||float64|| of the output and each gradient; the inputs are the same rounded numbers."""
    *inputs, grad = case.tensors(dtype, device)
    ours = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    out = flash_attention(*ours, case.spec, case.cu_seqlens(device))
    want = plain(exact[0], exact[1], exact[2], case, keep)
    out.backward(grad)
    want.backward(grad.double())
    pairs = [("out", out, want), *((n, x.grad, y.grad) for n, x, y in zip(("dq", "dk", "dv"), ours, exact))]
    errors = {}
    for name, x, y in pairs:
        assert x is not None and y is not None
        assert torch.isfinite(x).all(), f"{name} is not finite"
        errors[name] = float((x.detach().double() - y.detach()).norm() / y.detach().norm().clamp_min(1e-30))
    return errors


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_float64_autograd(name: str) -> None:
    errors = relative_errors(CASES[name], torch.float32)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("name", ["GQA, packed", "window wider than a tile"])
def test_float16_tiles_are_right_within_rounding(name: str) -> None:
    errors = relative_errors(CASES[name], torch.float16)
    assert max(errors.values()) < 2e-3, errors


def test_gradient_agrees_with_finite_differences() -> None:
    case = Case((6,), (7,), (2, 1), 16, FlashSpec(causal=True))
    q, k, v, grad = case.tensors(torch.float32)
    q.requires_grad_()
    flash_attention(q, k, v, case.spec, case.cu_seqlens()).backward(grad)
    assert q.grad is not None
    for index in [(0, 0, 0), (3, 1, 5), (5, 0, 15)]:
        step = torch.zeros_like(q, dtype=torch.float64)
        step[index] = 1e-5
        high, low = (
            (plain(q.detach().double() + sign * step, k.double(), v.double(), case) * grad).sum() for sign in (1, -1)
        )
        assert float(q.grad[index]) == pytest.approx(float(high - low) / 2e-5, rel=1e-3, abs=1e-5)


def test_the_gradient_is_the_same_bits_every_time() -> None:
    case = Case((40,), (40,), (2, 1), 16, FlashSpec(causal=True))
    results = []
    for _ in range(2):
        *inputs, grad = case.tensors(torch.float32)
        for x in inputs:
            x.requires_grad_()
        flash_attention(*inputs, case.spec, case.cu_seqlens()).backward(grad)
        results.append([x.grad for x in inputs])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_packing_changes_no_sequence() -> None:
    case = CASES["GQA, packed"]
    q, k, v, _ = case.tensors(torch.float32)
    together = flash_attention(q, k, v, case.spec, case.cu_seqlens())
    (a, b), (c, d) = (np.cumsum(n)[:2] for n in (case.num_q, case.num_k))
    alone = flash_attention(q[None, a:b], k[None, c:d], v[None, c:d], case.spec)
    assert torch.equal(together[a:b], alone[0])


def test_batched_form_equals_packed_form_and_takes_strided_inputs() -> None:
    case = Case((20, 20), (20, 20), (2, 2), 16, FlashSpec(causal=True))
    q, k, v, _ = case.tensors(torch.float32)
    packed = flash_attention(q, k, v, case.spec, case.cu_seqlens())
    heads_first = [x.view(2, 20, 2, 16).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    batched = flash_attention(heads_first[0], heads_first[1], heads_first[2], case.spec)
    assert torch.equal(batched.reshape(packed.shape), packed)


def philox(key: int, counter: np.ndarray) -> np.ndarray:
    """Philox-4x32-10 (Salmon et al. 2011): the first word for counters [..., 4]."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k0, k1, low = key & 0xFFFFFFFF, key >> 32, np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            second & low,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            first & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c[0]


def keep_masks(case: Case) -> dict[int, Tensor]:
    """What dropout keeps, from its definition: the draw of (seed, head, packed row, key position)."""
    masks, row = {}, 0
    for s, (num_q, num_k) in enumerate(zip(case.num_q, case.num_k)):
        counter = np.zeros((case.heads[0], num_q, num_k, 4), dtype=np.uint64)
        counter[..., 0] = np.arange(num_k)
        counter[..., 1] = (row + np.arange(num_q))[:, None]
        counter[..., 2] = np.arange(case.heads[0])[:, None, None]
        bits = philox(case.spec.seed, counter)
        masks[s] = torch.from_numpy(bits >= dropout_threshold(case.spec.dropout_p))
        row += num_q
    return masks


def test_philox_twin_gives_the_published_words() -> None:
    zeros, ones = np.zeros((1, 4), np.uint64), np.full((1, 4), 0xFFFFFFFF, np.uint64)
    assert philox(0, zeros)[0] == 0x6627E8D5
    assert philox(2**64 - 1, ones)[0] == 0x408F276D


@pytest.mark.parametrize("seed", [3, 2**40 + 12345])
def test_dropout_drops_the_same_weights_forward_and_backward(seed: int) -> None:
    case = Case((35, 10), (41, 10), (2, 1), 16, FlashSpec(causal=True, dropout_p=0.4, seed=seed))
    keep = keep_masks(case)
    share = float(torch.cat([m.flatten() for m in keep.values()]).double().mean())
    assert abs(share - 0.6) < 0.03
    errors = relative_errors(case, torch.float32, keep=keep)
    assert max(errors.values()) < 1e-5, errors


def test_dropout_masks_of_other_seeds_and_heads_differ() -> None:
    case = Case((16,), (16,), (2, 1), 16, FlashSpec(dropout_p=0.5, seed=1))
    mask = keep_masks(case)[0]
    other = keep_masks(Case((16,), (16,), (2, 1), 16, FlashSpec(dropout_p=0.5, seed=2)))[0]
    assert not torch.equal(mask, other) and not torch.equal(mask[0], mask[1])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"k": torch.zeros(2, 8, 3, 16)}, "k"),
        ({"k": torch.zeros(2, 8, 2, 32)}, "k"),
        ({"v": torch.zeros(2, 9, 2, 16)}, "k"),
        ({"q": torch.zeros(8, 2, 16)}, "q"),
        ({"v": torch.zeros(2, 8, 2, 16, dtype=torch.float64)}, "v"),
        ({"cu_seqlens": (torch.zeros(2), torch.zeros(2))}, "q"),
    ],
)
def test_a_broken_contract_names_the_argument(change: dict, param: str) -> None:
    arguments = {"q": torch.zeros(2, 8, 2, 16), "k": torch.zeros(2, 8, 2, 16), "v": torch.zeros(2, 8, 2, 16)} | change
    with pytest.raises(InvalidRequest) as caught:
        flash_attention(**arguments)
    assert caught.value.param == param


@pytest.mark.parametrize("field", [{"scale": 0.0}, {"window": 0}, {"dropout_p": 1.0}, {"seed": -1}])
def test_an_impossible_operator_is_refused(field: dict) -> None:
    with pytest.raises(InvalidRequest) as caught:
        FlashSpec(**field)
    assert caught.value.param == next(iter(field))


COMPILE = """
import json, sys
from steelyard.kernels.flash_autograd import FlashSpec
from steelyard.perf.cubin import compile_for
from steelyard.perf.kernel_resources import training_kernels
compile_for(90)
found = training_kernels(int(sys.argv[1]), FlashSpec(causal=True))
print(json.dumps([[k.name, k.need.num_wgmma, k.need.stack_bytes, k.need.shared_bytes] for k in found]))
"""


@pytest.mark.parametrize("head_dim", [64, *(pytest.param(d, marks=pytest.mark.slow) for d in (128, 256))])
def test_hopper_code_multiplies_on_wgmma_and_fits(head_dim: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(head_dim)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    rows = json.loads(done.stdout)
    assert len(rows) == 3
    for name, num_wgmma, stack_bytes, shared_bytes in rows:
        assert num_wgmma > 0, f"{name} multiplies without wgmma"
        assert stack_bytes <= (0 if head_dim <= 64 else 64), f"{name} spills {stack_bytes} B"
        assert shared_bytes <= 227 * 1024, f"{name} needs {shared_bytes} B of shared memory"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu_bfloat16_is_within_a_hundredth(name: str) -> None:
    errors = relative_errors(CASES[name], torch.bfloat16, "cuda")
    assert max(errors.values()) < 1e-2, errors


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_on_the_gpu_the_gradient_repeats_bit_for_bit(head_dim: int) -> None:
    case = Case((1000, 333), (1000, 400), (8, 2), head_dim, FlashSpec(causal=True))
    assert max(relative_errors(case, torch.bfloat16, "cuda").values()) < 1e-2
    *inputs, grad = case.tensors(torch.bfloat16, "cuda")
    first: list[Tensor] | None = None
    for _ in range(20):
        leaves = [x.clone().requires_grad_() for x in inputs]
        flash_attention(*leaves, case.spec, case.cu_seqlens("cuda")).backward(grad)
        grads = [x.grad for x in leaves if x.grad is not None]
        first = first or grads
        assert all(torch.equal(a, b) for a, b in zip(first, grads))
