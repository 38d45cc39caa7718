"""The choice of an attention backend, and the Triton operators as one backend."""

from __future__ import annotations

import pytest
import torch

from steelyard.errors import StartError
from steelyard.kernels.reference import ReferenceAttention, ReferenceBackend
from steelyard.kernels.sampling import Controls
from steelyard.kernels.select import ATTENTION, attention_class, choose_attention, make_attention
from steelyard.kernels.triton_backend import TritonBackend
from tests.kernels.paged import DEVICE, max_error

CPU = torch.device("cpu")


def test_every_name_of_the_table_can_be_imported() -> None:
    for name in ATTENTION:
        if name in ("sdpa", "naive"):
            assert make_attention(name).name == name
        else:
            assert attention_class(name).name == name


def test_auto_on_the_cpu_says_why_it_is_not_triton() -> None:
    choice = choose_attention("auto", 128, 64, CPU)
    assert choice.name == "cpu" and "CUDA" in choice.reason
    assert choose_attention("reference", 128, 64, CPU).name == "reference"


@pytest.mark.parametrize(
    ("capability", "head_dim", "block_size", "name", "why"),
    [
        ((9, 0), 128, 64, "triton", "head size 128"),
        ((7, 5), 128, 64, "sdpa", "8.0"),
        ((9, 0), 72, 64, "sdpa", "head size 72"),
        ((9, 0), 64, 24, "sdpa", "blocks of 24"),
    ],
)
def test_auto_on_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], head_dim: int, block_size: int,
                      name: str, why: str) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    choice = choose_attention("auto", head_dim, block_size, torch.device("cuda"))
    assert choice.name == name and why in choice.reason


def test_unknown_and_unusable_names_are_refused() -> None:
    with pytest.raises(StartError, match=r"'fast'.*auto, triton, cpu, sdpa, naive, reference"):
        choose_attention("fast", 128, 64, CPU)
    with pytest.raises(StartError, match=r"'triton'.*cuda, this is cpu"):
        choose_attention("triton", 128, 64, CPU)
    with pytest.raises(StartError, match=r"'flashinfer': the package flashinfer is not installed"):
        choose_attention("flashinfer", 128, 64, CPU)
    with pytest.raises(StartError, match=r"'cpu'.*cpu, this is cuda"):
        choose_attention("cpu", 128, 24, torch.device("cuda"))


def test_operators_equal_the_reference_backend() -> None:
    torch.manual_seed(0)
    ours, plain = TritonBackend(ReferenceAttention(), 8, DEVICE), ReferenceBackend()
    x, residual, norm = (torch.randn(*s, device=DEVICE) for s in ((3, 96), (3, 96), (96,)))
    weight, bias = torch.randn(50, 96, device=DEVICE), torch.randn(50, device=DEVICE)
    for rows in (1, 3):
        assert max_error(ours.linear(x[:rows], weight, bias), plain.linear(x[:rows], weight, bias)) < 1e-5
    assert max_error(ours.rms_norm(x, norm, 1e-6), plain.rms_norm(x, norm, 1e-6)) < 1e-5
    expected = plain.add_rms_norm(x, residual, norm, 1e-6)
    for a, b in zip(ours.add_rms_norm(x, residual, norm, 1e-6), expected):
        assert max_error(a, b) < 1e-5
    assert max_error(ours.gated(x, "silu"), plain.gated(x, "silu")) < 1e-5
    heads, cos_sin = torch.randn(3, 5, 64, device=DEVICE), torch.randn(3, 32, device=DEVICE)
    turned = plain.rotate(heads[:, :4], cos_sin)
    assert max_error(ours.rotate(heads[:, :4], cos_sin), turned) < 1e-5
    logits, u = torch.randn(3, 700, device=DEVICE) * 3, torch.tensor([0.1, 0.5, 0.9], device=DEVICE).double()
    u = (u * 2**32).floor() / 2**32
    top_p = torch.tensor([0.5, 0.9, 1.0], device=DEVICE)
    for controls in (Controls(torch.ones(3, device=DEVICE)), Controls(torch.ones(3, device=DEVICE), top_p=top_p)):
        assert ours.choose(logits, u, controls).tolist() == plain.choose(logits, u, controls).tolist()
