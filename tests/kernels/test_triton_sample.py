"""The sampler without a sort: against the full sort of the reference, in distribution edges, and under splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.kernels.reference import sample_row
from steelyard.kernels.triton_sample import Cut, Sampler, uniforms
from steelyard.runner.philox import uniform_words
from tests.kernels.paged import DEVICE

V = 4500


def seeds_and_positions(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(num_rows, device=DEVICE)
    return index * 7919 + (1 << 40), index * 31


def draws(num_rows: int) -> torch.Tensor:
    return uniforms(*seeds_and_positions(num_rows), torch.full((num_rows,), -1.0, dtype=torch.float64, device=DEVICE))


def sample(
    logits: torch.Tensor, u: torch.Tensor, temperature: float = 1.0, cut: Cut | None = None, few: int = 64
) -> list[int]:
    out = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=DEVICE)
    temperatures = torch.full((logits.shape[0],), temperature, device=DEVICE)
    return Sampler(16, DEVICE, splits=4, few=few)(logits, u, temperatures, cut, out).tolist()


def cuts(num_rows: int, top_k: int, top_p: float, min_p: float) -> Cut:
    return Cut(
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32, device=DEVICE),
        top_p=torch.full((num_rows,), top_p, device=DEVICE),
        min_p=torch.full((num_rows,), min_p, device=DEVICE),
    )


def test_uniforms_are_the_hosts_philox() -> None:
    seeds, positions = seeds_and_positions(5)
    words = uniform_words(seeds.cpu().numpy().astype(np.uint64), positions.cpu().numpy())
    assert draws(5).tolist() == [word / 2**32 for word in words.tolist()]


def test_greedy_takes_the_lowest_of_equal_best_ids_and_ignores_nan() -> None:
    logits = torch.randn(3, V, device=DEVICE)
    logits[0, [4100, 4200]] = 9.0
    logits[1, 77], logits[1, 5] = 8.0, float("nan")
    logits[2] = -5.0
    assert sample(logits, draws(3), 0.0) == [4100, 77, 0]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_without_cuts_it_is_the_inverse_cdf_in_id_order(temperature: float) -> None:
    torch.manual_seed(0)
    logits, u = torch.randn(3, V, device=DEVICE) * 3, draws(3)
    expected = [
        sample_row(row.double().cpu(), v, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        for row, v in zip(logits, u.tolist())
    ]
    assert sample(logits, u, temperature) == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "few"),
    [
        pytest.param(7, 1.0, 0.0, 2, id="top-k over all"),
        pytest.param(0, 0.8, 0.0, 2, id="top-p over all"),
        pytest.param(9, 1.0, 0.0, 512, id="top-k"),
        pytest.param(0, 1.0, 0.2, 512, id="min-p"),
        pytest.param(40, 0.7, 0.01, 512, id="all three"),
    ],
)
def test_cuts_keep_what_a_full_sort_keeps(top_k: int, top_p: float, min_p: float, few: int) -> None:
    """Flat rows, rows with ties at every threshold, a peaked row; few 2: too few are collected to decide."""
    torch.manual_seed(1)
    logits = torch.randn(5, V).to(DEVICE)
    logits[1:4] = (logits[1] * 2).round()
    logits[4] *= 6
    u = draws(5)
    expected = [
        sample_row(row.double().cpu(), v, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
        for row, v in zip(logits, u.tolist())
    ]
    assert sample(logits, u, cut=cuts(5, top_k, top_p, min_p), few=few) == expected


def test_a_rows_token_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(2)
    logits, u = torch.randn(4, V, device=DEVICE), draws(4)
    assert sample(logits, u)[2] == sample(logits[2:3], u[2:3])[0]


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.27)])
def test_of_equal_tokens_the_lowest_ids_stay(top_k: int, top_p: float) -> None:
    """Ten equal tokens and, after them, one that is better: it and two of the ten are kept."""
    logits = torch.full((3, V), float("-inf"), device=DEVICE)
    logits[:, :10], logits[:, 11] = 0.0, 0.1
    u = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device=DEVICE)
    u = (u * 2**32).floor() / 2**32
    assert sample(logits, u, cut=cuts(3, top_k, top_p, 0.0)) == [0, 1, 11]


def test_masked_tokens_are_never_chosen() -> None:
    logits = torch.full((4, V), float("-inf"), device=DEVICE)
    logits[:, 3000:3003] = 0.0
    assert set(sample(logits, draws(4))) <= {3000, 3001, 3002}
